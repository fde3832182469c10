// The entries of one partition as a vector, and back; and what a model exchanges to become another subnetwork.
#include <algorithm>

#include "backend.h"
#include "checks.h"

namespace partkernels::binding {
namespace {

// The entries of a weight that one partition owns.
struct Owned {
  Owners owners;
  int partition;
  std::vector<int64_t> starts;  // offset of each row's entries in the vector, then its length

  Owned(const Tensor& weight, int64_t partition, const Tensor& map, int64_t count)
      : owners(owners_of(map, count, sizes_of(weight), weight)), partition(static_cast<int>(partition)) {
    check_live(partition, partition, count);
    const int64_t rows = weight.size(0);
    starts.resize(rows + 1);
    if (weight.numel() == 0) return;
    cpu::count_entries(rows, weight.numel() / rows, owners, this->partition, starts.data(),
                       threads_for_entries(weight.numel()));
  }
};

Tensor gather_entries(Tensor weight, int64_t partition, Tensor map, int64_t count) {
  const Owned owned(weight, partition, map, count);
  const Tensor out = empty({owned.starts.back()}, weight);
  if (out.numel() == 0) return out;
  const Tensor from = of_4_dimensions(weight);
  with_type(weight.scalar_type(), [&]<class T>(T) {
    cpu::gather_entries(weight_of<const T>(from), owned.owners, owned.partition, owned.starts.data(), data<T>(out),
                        threads_for_entries(weight.numel()));
  });
  return out;
}

void scatter_entries(Tensor weight, Tensor values, int64_t partition, Tensor map, int64_t count) {
  const Owned owned(weight, partition, map, count);
  STD_TORCH_CHECK(values.dim() == 1 && values.numel() == owned.starts.back() && alike(values, weight), "values have ",
                  values.numel(), " numbers; expected ", owned.starts.back(),
                  " of the weight's dtype, in one dimension");
  if (values.numel() == 0) return;
  const Tensor from = dense(values), to = of_4_dimensions(weight);
  with_type(weight.scalar_type(), [&]<class T>(T) {
    cpu::scatter_entries(data<const T>(from), owned.starts.data(), owned.owners, owned.partition, weight_of<T>(to),
                         threads_for_entries(weight.numel()));
  });
  write_back(weight, to);
}

using Tensors = std::vector<Tensor>;

// Entries of a tensor that are saved, unless `saved` is 0, and replaced by values. A table of these can be made once
// for many calls, so all fields are int64: addresses, numbers of entries, and bytes of an entry and of a place.
struct Replacement {
  int64_t entries, numel, entry_bytes, places, place_bytes, count, values, saved;
};

// A vector that becomes the sum, or the product, of rows of the same length.
struct Combination {
  int64_t vector, rows, length, entry_bytes, is_product;
};

template <class T>
T* at(int64_t address) {
  return reinterpret_cast<T*>(address);  // NOLINT(performance-no-int-to-ptr)
}

// Calls use(T{}) with the type of entries of so many bytes; float16 is moved as bfloat16.
template <class Use>
void with_entry_bytes(int64_t bytes, const Use& use) {
  switch (bytes) {
    case 2:
      return use(bfloat16{});
    case 4:
      return use(float{});
    case 8:
      return use(double{});
    default:
      STD_TORCH_CHECK(false, "entries of ", bytes, " bytes; expected 2, 4 or 8");
  }
}

// No two places are the same, so that the order is free.
template <class T, class Place>
void replace_entries(const Replacement& one, int64_t begin, int64_t end) {
  T *const entries = at<T>(one.entries), *const saved = at<T>(one.saved);
  const T* const values = at<const T>(one.values);
  const Place* const places = at<const Place>(one.places);
  constexpr int64_t kBlock = 64;  // reads of a block before its writes, which hides the time of loads
  for (int64_t i = begin; i < end; i += kBlock) {
    const int64_t stop = std::min(end, i + kBlock);
    if (saved != nullptr) {
      for (int64_t j = i; j < stop; ++j) saved[j] = entries[places[j]];
    }
    for (int64_t j = i; j < stop; ++j) entries[places[j]] = values[j];
  }
}

// Replaces entries of one tensor by several lists of places, such as those of two partitions, each usually ascending.
// The lists take turns at parts of the tensor that stay in the cache: with two lists of a tenth of the entries each,
// that takes .65 of the time of one list after the other.
template <class T, class Place>
void replace_in_tensor(const Replacement* first, const Replacement* last) {
  constexpr int64_t kPart = (1 << 17) / sizeof(T);
  const int64_t parts = (first->numel + kPart - 1) / kPart;
  // Where each list enters a part; it never goes back, so that each place has its turn in any order.
  std::vector<int64_t> starts;
  int64_t count = 0;
  for (const Replacement* one = first; one != last; ++one) {
    const Place* const places = at<const Place>(one->places);
    int64_t start = 0;
    for (int64_t part = 0; part < parts; ++part) {
      if (part > 0) {
        start = std::lower_bound(places + start, places + one->count, static_cast<Place>(part * kPart)) - places;
      }
      starts.push_back(start);
    }
    starts.push_back(one->count);
    count += one->count;
  }
  threads_for_entries(count)(parts, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      for (const Replacement* one = first; one != last; ++one) {
        const int64_t* const start = &starts[(one - first) * (parts + 1) + part];
        replace_entries<T, Place>(*one, start[0], start[1]);
      }
    }
  });
}

void replace_all(const Replacement* one, const Replacement* end) {
  while (one != end) {
    const Replacement* const first = one;
    while (one != end && one->entries == first->entries && one->place_bytes == first->place_bytes) ++one;
    with_entry_bytes(first->entry_bytes, [&]<class T>(T) {
      if (first->place_bytes == sizeof(int32_t)) {
        replace_in_tensor<T, int32_t>(first, one);
      } else {
        replace_in_tensor<T, int64_t>(first, one);
      }
    });
  }
}

// Combines the first `active` rows, without row `skip`; -1 skips none.
template <class T>
void combine(const Combination& one, int64_t active, int64_t skip) {
  T* const out = at<T>(one.vector);
  const T* const rows = at<const T>(one.rows);
  for (int64_t j = 0; j < one.length; ++j) {
    auto total = cpu::widen(T{});
    if (one.is_product != 0) total = 1;
    for (int64_t row = 0; row < active; ++row) {
      if (row == skip) continue;
      const auto next = cpu::widen(rows[row * one.length + j]);
      total = one.is_product != 0 ? total * next : total + next;
    }
    if constexpr (std::is_same_v<T, bfloat16>) {
      out[j] = to_bfloat16(total);
    } else {
      out[j] = total;
    }
  }
}

void combine_all(const Combination* one, const Combination* end, int64_t active, int64_t skip) {
  for (; one != end; ++one) {
    with_entry_bytes(one->entry_bytes, [&]<class T>(T) { combine<T>(*one, active, skip); });
  }
}

int64_t address_of(const Tensor& tensor) {
  return tensor.numel() == 0 ? 0 : reinterpret_cast<int64_t>(tensor.data_ptr());
}

void exchange_entries(Tensors tensors, Tensors places, Tensors values, Tensors saved) {
  STD_TORCH_CHECK(tensors.size() == places.size() && tensors.size() == values.size() && tensors.size() == saved.size(),
                  "lists of ", tensors.size(), ", ", places.size(), ", ", values.size(), " and ", saved.size(),
                  " tensors");
  std::vector<Replacement> all;
  for (size_t i = 0; i < tensors.size(); ++i) {
    bool fits = places[i].numel() == values[i].numel() &&
                (saved[i].numel() == 0 || saved[i].numel() == values[i].numel()) && alike(values[i], tensors[i]) &&
                alike(saved[i], tensors[i]) &&
                (places[i].scalar_type() == ScalarType::Int || places[i].scalar_type() == ScalarType::Long);
    for (const Tensor& one : {tensors[i], places[i], values[i], saved[i]}) {
      fits = fits && one.dim() == 1 && one.is_contiguous();
    }
    STD_TORCH_CHECK(fits, "entry ", i,
                    " of the lists does not fit: expected contiguous vectors, a value for each place");
    all.push_back({address_of(tensors[i]), tensors[i].numel(), static_cast<int64_t>(tensors[i].element_size()),
                   address_of(places[i]), static_cast<int64_t>(places[i].element_size()), places[i].numel(),
                   address_of(values[i]), address_of(saved[i])});
  }
  replace_all(all.data(), all.data() + all.size());
}

void combine_rows(Tensors vectors, Tensors rows, int64_t active, Sizes are_products, int64_t skip) {
  STD_TORCH_CHECK(vectors.size() == rows.size() && vectors.size() == are_products.size(), "lists of ", vectors.size(),
                  ", ", rows.size(), " and ", are_products.size());
  std::vector<Combination> all;
  for (size_t i = 0; i < vectors.size(); ++i) {
    const int64_t length = vectors[i].numel(), count = rows[i].dim() == 0 ? 0 : rows[i].size(0);
    STD_TORCH_CHECK(vectors[i].is_contiguous() && rows[i].is_contiguous() && alike(vectors[i], rows[i]) &&
                        rows[i].numel() == count * length && 1 <= active && active <= count,
                    "vector ", i,
                    " does not fit: expected rows [C, ...] of the vector's shape and dtype, and active in"
                    " 1..C");
    with_type(vectors[i].scalar_type(), [&]<class T>(T) {
      all.push_back({address_of(vectors[i]), address_of(rows[i]), length, sizeof(T), are_products[i]});
    });
  }
  combine_all(all.data(), all.data() + all.size(), active, skip);
}

// The two operators above for tables [number, fields], which Python makes of tensors that it has checked.
void exchange_by_tables(Tensor replacements, Tensor combinations, int64_t active, int64_t skip) {
  const auto* const replaced = static_cast<const Replacement*>(replacements.data_ptr());
  replace_all(replaced, replaced + replacements.size(0));
  const auto* const combined = static_cast<const Combination*>(combinations.data_ptr());
  combine_all(combined, combined + combinations.size(0), active, skip);
}

PARTKERNELS_KERNELS(m) {
  m.impl("exchange_entries", TORCH_BOX(&exchange_entries));
  m.impl("combine_rows", TORCH_BOX(&combine_rows));
  m.impl("exchange_by_tables", TORCH_BOX(&exchange_by_tables));
  m.impl("gather_entries", TORCH_BOX(&gather_entries));
  m.impl("scatter_entries", TORCH_BOX(&scatter_entries));
}

}  // namespace
}  // namespace partkernels::binding
