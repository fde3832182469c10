#include "operators.h"

#if defined(PARTKERNELS_X86_TARGETS)
#include "amx.h"

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace partkernels::cpu::amx {

bool has_tiles() { return __builtin_cpu_supports("amx-tile") != 0; }
bool has_products() { return __builtin_cpu_supports("amx-bf16") != 0; }

bool is_permitted() {
#if defined(__linux__)
  constexpr long kAskForPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kAskForPermission, kTileData) == 0;
#else
  return false;  // not tested on other systems
#endif
}

}  // namespace partkernels::cpu::amx
#endif
