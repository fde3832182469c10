// Headers that the operators use. Included before an isa_*.cpp sets its instruction set, so that inline functions that
// several files share are the same in all of them.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <numeric>
#include <type_traits>
#include <utility>
#include <vector>

#include "accumulator.h"
#include "operators.h"
#include "partkernels/bfloat16.h"
#include "partkernels/cpu.h"
#include "partkernels/defaults.h"
#include "partkernels/optimizers.h"
#include "partkernels/packed_map.h"
#include "partkernels/philox.h"

#if defined(PARTKERNELS_X86_TARGETS)
#include <immintrin.h>
#elif defined(PARTKERNELS_ARM_TARGETS)
#include <arm_neon.h>
#endif
