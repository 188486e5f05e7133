// SPDX-License-Identifier: Apache-2.0
#include "haystack.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include <kvpolicy/core/error.hpp>

#include "../common/texts.hpp"

namespace kvpolicy::tools {
namespace {

constexpr std::size_t max_bytes_per_token = 12;  // of a long text, generously
constexpr std::string_view repeated_noise =
    "The road is long. The hills are low. Clouds move over them and the wind is quiet. We walk on, "
    "and then we walk back.\n";

}  // namespace

Haystack::Haystack(std::string_view prose, std::size_t max_tokens, Random& random) {
  require(!prose.empty(), "there is no prose to hide facts in");
  const std::size_t bytes = std::min(prose.size(), max_bytes_per_token * max_tokens);
  std::size_t begin = random.below(prose.size());
  while (begin > 0 && !is_unit_start(prose, begin)) begin = (begin + 1) % prose.size();
  text_ = prose.substr(begin, bytes);
  if (text_.size() < bytes) {
    if (!is_unit_start(text_, text_.size())) text_ += '\n';
    text_ += prose.substr(0, bytes - std::min(bytes, text_.size()));
  }
  find_boundaries();
}

Haystack::Haystack(std::size_t max_tokens) {
  while (text_.size() < max_bytes_per_token * max_tokens) text_ += repeated_noise;
  find_boundaries();
}

void Haystack::find_boundaries() {
  for (std::size_t at = 0; at <= text_.size(); ++at) {
    const bool is_end = at == text_.size();
    if (at == 0 || is_end || is_unit_start(text_, at)) sentences_.push_back(at);
    if (at > 0 && (is_end || ((text_[at] == ' ' || text_[at] == '\n') && text_[at - 1] != ' '))) {
      word_ends_.push_back(at);
    }
  }
}

std::string Haystack::with(std::size_t words, const std::vector<Needle>& needles) const {
  const std::string_view text = std::string_view{text_}.substr(0, words == 0 ? 0 : word_ends_[words - 1]);
  const auto end = std::ranges::upper_bound(sentences_, text.size());
  std::vector<std::pair<std::size_t, const Needle*>> placed;
  for (const Needle& needle : needles) {
    const double wanted = needle.depth * static_cast<double>(text.size());
    const std::size_t nearest = *std::min_element(sentences_.begin(), end, [&](std::size_t a, std::size_t b) {
      return std::abs(static_cast<double>(a) - wanted) < std::abs(static_cast<double>(b) - wanted);
    });
    placed.emplace_back(nearest, &needle);
  }
  std::ranges::stable_sort(placed, {}, &std::pair<std::size_t, const Needle*>::first);
  std::string body;
  std::size_t done = 0;
  for (const auto& [at, needle] : placed) {
    body += text.substr(done, at - done);
    done = at;
    body += needle->sentence;
    body += at > 0 && text[at - 1] == '\n' ? '\n' : ' ';
  }
  body += text.substr(done);
  return without_end_space(body);
}

std::string without_end_space(std::string_view text) {
  return std::string{text.substr(0, text.find_last_not_of(" \n") + 1)};
}

std::size_t reserve_answers(std::vector<LanguageQuestion>& questions, const CountTokens& count) {
  std::size_t most = 0;
  for (LanguageQuestion& question : questions) {
    question.max_tokens = 0;
    for (const std::string& choice : question.choices) {
      question.max_tokens = std::max(question.max_tokens, count(choice));
    }
    if (question.choices.empty()) {
      std::string answer;
      for (const std::string& part : question.answers) answer += part + ", ";
      question.max_tokens = count(answer) * 3 / 2 + 8;  // for a few words besides the answer
    }
    most = std::max(most, count(question.prompt()) + question.max_tokens);
  }
  return most;
}

std::string fit_body(const LanguageTaskConfig& config, const CountTokens& count,
                     std::vector<LanguageQuestion>& questions, std::size_t least, std::size_t most,
                     const MakeBody& make_body) {
  const std::size_t tail = config.overhead + reserve_answers(questions, count);
  const auto fits = [&](std::size_t parts) {
    return parts <= most && tail + count(make_body(parts)) <= config.length;
  };
  require(fits(least), "a task ", name_of(config.family), " of ", config.length,
          " tokens is too short; it takes at least ", tail + count(make_body(std::min(least, most))));
  std::size_t parts = least;
  std::size_t step = 16;
  for (; fits(parts + step); step *= 2) parts += step;
  for (; step > 0; step /= 2) {
    if (fits(parts + step)) parts += step;
  }
  std::string body = make_body(parts);
  require(parts < most || tail + count(body) + config.length / 20 >= config.length, "a task ",
          name_of(config.family), " of ", config.length,
          " tokens is longer than there is text for, which is ", tail + count(body), " tokens");
  return body;
}

double draw_depth(Random& random) { return static_cast<double>(random.below(10001)) / 10000; }

}  // namespace kvpolicy::tools
