// SPDX-License-Identifier: Apache-2.0
#include "needles.hpp"

#include <cmath>
#include <limits>
#include <string>

#include <kvpolicy/core/error.hpp>

#include "../common/exam.hpp"
#include "../common/retrieval_text.hpp"

namespace kvpolicy::tools {

reference::NeedleSample draw_needle(std::string_view plain, const NeedleConfig& config) {
  constexpr std::uint64_t draws = 10'000;
  for (std::uint64_t draw = 0; draw < draws; ++draw) {
    const RetrievalText text =
        draw_text(plain, {.length = config.length,
                          .questions = questions_per_text(config.length, config.reasoning),
                          .two_step = config.reasoning,
                          .seed = config.seed,
                          .number = config.number * draws + draw});
    const Question* nearest = nullptr;
    double off = config.tolerance;
    for (const Question& question : text.questions) {
      const double depth =
          1.0 - static_cast<double>(question.distance) / static_cast<double>(text.body.size());
      if (std::abs(depth - config.depth) <= off) {
        nearest = &question;
        off = std::abs(depth - config.depth);
      }
    }
    if (nearest == nullptr) continue;
    // A fact is its answer and a space.
    const std::size_t needle = text.body.size() - nearest->distance - 1 - nearest->answer.size();
    return {.prompt = tokens_of(text.body + nearest->text),
            .answer = tokens_of(nearest->answer),
            .needle = needle,
            .needle_tokens = nearest->answer.size()};
  }
  throw ConfigError(message("no text of ", config.length, " bytes has a fact within ",
                            config.tolerance, " of depth ", config.depth));
}

}  // namespace kvpolicy::tools
