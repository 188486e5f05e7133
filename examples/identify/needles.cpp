// SPDX-License-Identifier: Apache-2.0
#include "needles.hpp"

#include <cmath>
#include <string>
#include <vector>

#include <kvpolicy/core/error.hpp>

#include "../common/asked_question.hpp"
#include "../common/retrieval_text.hpp"

namespace kvpolicy::tools {

reference::NeedleSample draw_needle(const TextModel& model, std::string_view plain,
                                    const NeedleConfig& config) {
  constexpr std::uint64_t draws = 10'000;
  for (std::uint64_t draw = 0; draw < draws; ++draw) {
    const RetrievalText text =
        draw_text_in_tokens(model, plain, config.length,
                            {.questions = questions_per_text(config.length, config.reasoning),
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
    const std::size_t first = text.body.size() - nearest->distance - 1 - nearest->answer.size();
    const AskedQuestion asked{model, text.body, *nearest};
    reference::NeedleSample sample{.prompt = model.encode(text.body), .answer = asked.answer()};
    sample.needle = model.tokens_before(sample.prompt, text.body, first);
    const std::size_t end =
        model.tokens_before(sample.prompt, text.body, first + nearest->answer.size());
    sample.needle_tokens = end - sample.needle;
    sample.prompt.insert(sample.prompt.end(), asked.question().begin(), asked.question().end());
    return sample;
  }
  throw ConfigError(message("no text of ", config.length, " tokens has a fact within ",
                            config.tolerance, " of depth ", config.depth));
}

}  // namespace kvpolicy::tools
