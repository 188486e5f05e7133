// SPDX-License-Identifier: Apache-2.0
#include "needles.hpp"

#include <algorithm>
#include <cmath>
#include <span>
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

reference::AnswerCheck contains_key(const TextModel& model,
                                    const reference::NeedleSample& sample) {
  constexpr const char* digits = "0123456789";
  const std::string answer = model.decode(sample.answer);  // "The key of Bamelo is 48213."
  const std::size_t first = answer.find_first_of(digits);
  const std::size_t last = answer.find_last_of(digits);
  require(first != std::string::npos, "contains_key: the answer '", answer, "' has no digits");
  return {.is_right = [&model, key = answer.substr(first, last + 1 - first)](
                          std::span<const int> said) {
    const auto end = std::ranges::find_if(said, [&](int token) { return model.is_end(token); });
    return model.decode({said.begin(), end}).find(key) != std::string::npos;
  }};
}

}  // namespace kvpolicy::tools
