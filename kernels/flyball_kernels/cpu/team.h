// Ops as work that a team of threads shares, so that an op can contain others: a parallel region costs more than they do
// when a step has few tokens.
#pragma once

#include <functional>
#include <initializer_list>

#include "tensors.h"

namespace flyball {

// Prepared by one thread, and then run by each thread of a team. Its loops are `omp for`, which share the iterations and end
// with a barrier. It holds pointers: the tensors have to live until it has run.
struct Work {
  int64_t num_floats = 0;  // of the memory that the team has for it
  std::function<void(float* memory)> run;
};

// Runs works one after another, in one parallel region if that is worth it.
inline void run_in_team(std::initializer_list<Work> works, bool is_parallel = true) {
  struct Shared;
  int64_t num_floats = 0;
  for (const Work& work : works) num_floats = std::max(num_floats, work.num_floats);
  float* const memory = scratch<Shared>(num_floats);
#pragma omp parallel if (is_parallel)
  for (const Work& work : works) work.run(memory);
}

}  // namespace flyball
