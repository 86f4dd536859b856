// What the library was compiled for.
#include "dot.h"
#include "tensors.h"

namespace flyball {
namespace {

std::string instruction_set() {
#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512BF16__)
  return "x86-64-v4-amx";
#elif defined(__AVX512BF16__)
  return "x86-64-v4-bf16";
#elif defined(__AVX512VNNI__)
  return "x86-64-v4-vnni";
#elif defined(__AVX512F__)
  return "x86-64-v4";
#elif defined(__AVX2__)
  return "x86-64-v3";
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) && defined(__ARM_FEATURE_DOTPROD)
  return "armv8.2-a-bf16";
#elif defined(__ARM_FEATURE_DOTPROD)
  return "armv8.2-a-dotprod";
#elif defined(__aarch64__)
  return "armv8-a";
#else
  return "generic";
#endif
}

TORCH_LIBRARY_FRAGMENT(flyball, m) {
  m.def("instruction_set() -> str", &instruction_set);
  m.def("has_dot() -> bool", [] { return has_dot(); });
}

}  // namespace
}  // namespace flyball
