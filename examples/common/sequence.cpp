// SPDX-License-Identifier: Apache-2.0
#include "sequence.hpp"

#include <utility>

#include "plan_sequence.hpp"

#ifdef _OPENMP
#include <omp.h>
#endif

namespace kvpolicy::tools {

void Sequence::choose_after_prompt(const FastGenConfig&) {
  throw ConfigError{"Sequence: only one of bfloat16 on the CPU chooses its plan after the prompt"};
}

void Sequence::score_rows(std::span<const int>, const reference::RepeatRequest&) {
  throw ConfigError{"Sequence::score_rows: only a sequence on the CPU scores its rows by repeating the text"};
}

std::vector<double> Sequence::largest_scores(std::size_t, std::size_t) const {
  throw ConfigError{"Sequence::largest_scores: only a sequence on the CPU scores its rows"};
}

double Sequence::footprint() const {
  throw ConfigError{"Sequence::footprint: only a sequence on the CPU adds up what it holds"};
}

std::unique_ptr<Sequence> Sequence::fork_as(HeadPlan<bfloat16>) const {
  throw ConfigError{"Sequence::fork_as: only a sequence of bfloat16 on the CPU goes under another plan"};
}

std::unique_ptr<Sequence> make_sequence(const reference::Llama& model, HeadPlan<bfloat16> plan,
                                        std::size_t kept_queries) {
  return make_plan_sequence(model, std::move(plan), {.kept_queries = kept_queries});
}

void set_threads([[maybe_unused]] std::size_t threads) {
#ifdef _OPENMP
  if (threads > 0) omp_set_num_threads(static_cast<int>(threads));
#endif
}

std::size_t threads() {
#ifdef _OPENMP
  return static_cast<std::size_t>(omp_get_max_threads());
#else
  return 1;
#endif
}

}  // namespace kvpolicy::tools
