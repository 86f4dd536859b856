// What the library was compiled for, and where its threads run.
#include <sched.h>

#include <cerrno>

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

// Has each of the threads that compute run on a core of its own, or all of them on all of these cores. Returns 0, or errno where
// one could not be told; the others have been.
int64_t place_threads(at::IntArrayRef cores, bool apart) {
  std::atomic<int> error{0};
#if defined(__linux__)
  TORCH_CHECK_VALUE(!cores.empty() && *std::min_element(cores.begin(), cores.end()) >= 0, "no cores, or a negative one: ", cores);
  const int64_t num_bits = *std::max_element(cores.begin(), cores.end()) + 1;
#pragma omp parallel
  {
    cpu_set_t* set = CPU_ALLOC(num_bits);
    const size_t size = CPU_ALLOC_SIZE(num_bits);
    CPU_ZERO_S(size, set);
    for (size_t i = 0; i < cores.size(); ++i)
      if (!apart || i == omp_get_thread_num() % cores.size()) CPU_SET_S(cores[i], size, set);
    if (sched_setaffinity(0, size, set) != 0) error = errno;
    CPU_FREE(set);
  }
#else
  error = ENOSYS;
#endif
  return error;
}

TORCH_LIBRARY_FRAGMENT(flyball, m) {
  m.def("instruction_set() -> str", &instruction_set);
  m.def("has_dot() -> bool", [] { return has_dot(); });
  m.def("place_threads(int[] cores, bool apart) -> int", &place_threads);
}

}  // namespace
}  // namespace flyball
