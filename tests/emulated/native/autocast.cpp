// Autocast by torch's own lists of operators.
#include "emulated.h"
namespace emu {
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
#define LOWP(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FP32D(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PROM(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
using namespace at::autocast;
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOWP) AT_FORALL_FP32(FP32) AT_FORALL_FP32_SET_OPT_DTYPE(FP32D) AT_FORALL_PROMOTE(PROM)
}
}  // namespace emu
