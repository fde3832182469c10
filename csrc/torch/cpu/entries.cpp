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

// Places in a tensor, and what is to be there.
struct Exchange {
  Tensor places, values, saved;
};

// Saves entries unless there is no room, and replaces them by values, by their bits. No two places are the same, so
// that the order is free.
template <class Word, class Place>
void replace_entries(Word* entries, const Exchange& exchange, int64_t begin, int64_t end) {
  const Word* const others = static_cast<const Word*>(exchange.values.data_ptr());
  Word* const kept = exchange.saved.numel() == 0 ? nullptr : static_cast<Word*>(exchange.saved.data_ptr());
  const Place* const at = data<const Place>(exchange.places);
  constexpr int64_t kBlock = 64;  // reads of a block before its writes, which hides the time of loads
  for (int64_t i = begin; i < end; i += kBlock) {
    const int64_t stop = std::min(end, i + kBlock);
    if (kept != nullptr) {
      for (int64_t j = i; j < stop; ++j) kept[j] = entries[at[j]];
    }
    for (int64_t j = i; j < stop; ++j) entries[at[j]] = others[j];
  }
}

// Exchanges one tensor with several lists of places, such as those of two partitions, each usually ascending. The lists
// take turns at parts of the tensor that stay in the cache: with two lists of a tenth of the entries each, that takes
// .65 of the time of one list after the other.
template <class Word, class Place>
void exchange_tensor(const Tensor& tensor, const std::vector<Exchange>& exchanges) {
  constexpr int64_t kPart = (1 << 17) / sizeof(Word);
  const int64_t parts = (tensor.numel() + kPart - 1) / kPart;
  // Where each list enters a part; it never goes back, so that each place has its turn in any order.
  std::vector<std::vector<int64_t>> starts;
  int64_t count = 0;
  for (const Exchange& one : exchanges) {
    const int64_t length = one.places.numel();
    const Place* const at = data<const Place>(one.places);
    std::vector<int64_t> start(parts + 1, length);
    start[0] = 0;
    for (int64_t part = 1; part < parts; ++part) {
      start[part] = std::lower_bound(at + start[part - 1], at + length, static_cast<Place>(part * kPart)) - at;
    }
    starts.push_back(std::move(start));
    count += length;
  }
  Word* const entries = static_cast<Word*>(tensor.data_ptr());
  threads_for_entries(count)(parts, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      for (size_t i = 0; i < exchanges.size(); ++i) {
        replace_entries<Word, Place>(entries, exchanges[i], starts[i][part], starts[i][part + 1]);
      }
    }
  });
}

template <class Word>
void exchange_words(const Tensor& tensor, const std::vector<Exchange>& exchanges) {
  if (exchanges.front().places.scalar_type() == ScalarType::Int) {
    exchange_tensor<Word, int32_t>(tensor, exchanges);
  } else {
    exchange_tensor<Word, int64_t>(tensor, exchanges);
  }
}

void exchange_entries(Tensors tensors, Tensors places, Tensors values, Tensors saved) {
  STD_TORCH_CHECK(tensors.size() == places.size() && tensors.size() == values.size() && tensors.size() == saved.size(),
                  "lists of ", tensors.size(), ", ", places.size(), ", ", values.size(), " and ", saved.size(),
                  " tensors");
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
  }
  for (size_t i = 0; i < tensors.size();) {
    const Tensor& tensor = tensors[i];
    const ScalarType type = places[i].scalar_type();
    std::vector<Exchange> exchanges;
    for (; i < tensors.size() && tensors[i].data_ptr() == tensor.data_ptr() && places[i].scalar_type() == type; ++i) {
      exchanges.push_back({places[i], values[i], saved[i]});
    }
    switch (tensor.element_size()) {
      case 2:
        exchange_words<uint16_t>(tensor, exchanges);
        break;
      case 4:
        exchange_words<uint32_t>(tensor, exchanges);
        break;
      case 8:
        exchange_words<uint64_t>(tensor, exchanges);
        break;
      default:
        STD_TORCH_CHECK(false, "entries of ", tensor.element_size(), " bytes; expected 2, 4 or 8");
    }
  }
}

// Sums, or products, of the first `active` rows of each tensor [C, ...], without row `skip`; -1 skips none.
void combine_rows(Tensors vectors, Tensors rows, int64_t active, Sizes are_products, int64_t skip) {
  STD_TORCH_CHECK(vectors.size() == rows.size() && vectors.size() == are_products.size(), "lists of ", vectors.size(),
                  ", ", rows.size(), " and ", are_products.size());
  for (size_t i = 0; i < vectors.size(); ++i) {
    const int64_t length = vectors[i].numel(), count = rows[i].dim() == 0 ? 0 : rows[i].size(0);
    STD_TORCH_CHECK(vectors[i].is_contiguous() && rows[i].is_contiguous() && alike(vectors[i], rows[i]) &&
                        rows[i].numel() == count * length && 1 <= active && active <= count,
                    "vector ", i,
                    " does not fit: expected rows [C, ...] of the vector's shape and dtype, and active in"
                    " 1..C");
  }
  for (size_t i = 0; i < vectors.size(); ++i) {
    with_type(vectors[i].scalar_type(), [&]<class T>(T) {
      T* const out = data<T>(vectors[i]);
      const T* const from = data<const T>(rows[i]);
      const int64_t length = vectors[i].numel();
      for (int64_t j = 0; j < length; ++j) {
        auto total = cpu::widen(T{});
        if (are_products[i]) total = 1;
        for (int64_t row = 0; row < active; ++row) {
          if (row == skip) continue;
          const auto next = cpu::widen(from[row * length + j]);
          total = are_products[i] ? total * next : total + next;
        }
        if constexpr (std::is_same_v<T, bfloat16>) {
          out[j] = to_bfloat16(total);
        } else {
          out[j] = total;
        }
      }
    });
  }
}

PARTKERNELS_KERNELS(m) {
  m.impl("exchange_entries", TORCH_BOX(&exchange_entries));
  m.impl("combine_rows", TORCH_BOX(&combine_rows));
  m.impl("gather_entries", TORCH_BOX(&gather_entries));
  m.impl("scatter_entries", TORCH_BOX(&scatter_entries));
}

}  // namespace
}  // namespace partkernels::binding
