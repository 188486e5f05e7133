// SPDX-License-Identifier: Apache-2.0
//
// Rows times the tokens for which they are held, compared with loops over tokens that write down who is there.
#include <common/footprint.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <common/exam_plan.hpp>
#include <common/sequence.hpp>
#include <evaluate/prompt_forks.hpp>
#include <evaluate/suite.hpp>

#include "byte_model.hpp"

using namespace kvpolicy;
using namespace kvpolicy::tools;

namespace {

std::vector<int> some_tokens(std::size_t count) {
  std::vector<int> tokens(count);
  for (std::size_t i = 0; i < count; ++i) tokens[i] = static_cast<int>((i * i + 7 * i) % 251);
  return tokens;
}

HeadPlan<bfloat16> plan_of(const reference::Llama& model, const std::string& name) {
  return make_exam_plan(name, model.config().shape(), "", Compress::after_text).plan;
}

// Of one head: rows that are there while each token is read, added up. `left(t)`: rows after t tokens, once a call
// has ended there.
double by_hand(const std::vector<std::size_t>& calls, const std::function<std::size_t(std::size_t)>& left) {
  double sum = 0;
  double full = 0;
  std::size_t text = 0;
  for (const std::size_t tokens : calls) {
    std::size_t rows = text == 0 ? 0 : left(text);
    for (std::size_t i = 0; i < tokens; ++i) {
      ++rows;
      ++text;
      sum += static_cast<double>(rows);
      full += static_cast<double>(text);
    }
  }
  return sum / full;
}

// The lengths of the calls by which a prompt of `prompt` tokens is read, and those of `decoded` tokens.
std::vector<std::size_t> calls_of(std::size_t prompt, std::size_t chunk, std::size_t decoded) {
  std::vector<std::size_t> calls;
  for (; prompt > chunk; prompt -= chunk) calls.push_back(chunk);
  calls.push_back(prompt);
  calls.insert(calls.end(), decoded, 1);
  return calls;
}

// Reads a prompt and decodes.
double footprint(Sequence& sequence, std::size_t prompt, std::size_t chunk, std::size_t decoded,
                 bool compresses) {
  static_cast<void>(sequence.prefill(some_tokens(prompt), chunk));
  if (compresses) sequence.compress();
  for (std::size_t i = 0; i < decoded; ++i) static_cast<void>(sequence.decode(static_cast<int>(i)));
  return sequence.footprint();
}

}  // namespace

TEST_CASE("footprint: nothing, one token, and sums that 32 bits do not hold") {
  CHECK(Footprint{}.share_of_full(4, 0) == 0);
  Footprint one;
  one.add(0, 3, 1);
  CHECK(one.row_steps() == 3);
  CHECK(one.share_of_full(3, 1) == 1);
  Footprint large;
  large.add(std::size_t{1} << 30, 1000, 100'000);
  // 2^30 rows for 100,000 tokens, and 1 + 2 + ... + 100,000 rows of each head.
  CHECK(large.row_steps() == (std::uint64_t{1} << 30) * 100'000 + std::uint64_t{1000} * 5'000'050'000);
  Footprint none;
  none.add(7, 3, 0);
  CHECK(none.row_steps() == 0);
}

TEST_CASE("footprint: a cache that keeps every row has that of a full one, in however many calls") {
  const reference::Llama model = random_byte_model();
  for (const char* name : {"full", "int4:32", "quest:16,64", "chunk:16,64"}) {
    CAPTURE(name);
    for (const std::size_t chunk : {std::size_t{1}, std::size_t{63}, std::size_t{64}, std::size_t{512}}) {
      const auto sequence = make_sequence(model, plan_of(model, name));
      CHECK(sequence->footprint() == 0);
      CHECK(footprint(*sequence, 131, chunk, 5, false) == 1.0);
    }
  }
}

TEST_CASE("footprint: a window holds its rows, and those of the call that it has not seen the end of") {
  const reference::Llama model = random_byte_model();
  for (const std::size_t prompt : {std::size_t{1}, std::size_t{20}, std::size_t{21}, std::size_t{131}}) {
    for (const std::size_t chunk : {std::size_t{1}, std::size_t{17}, std::size_t{512}}) {
      CAPTURE(prompt);
      CAPTURE(chunk);
      const auto sequence = make_sequence(model, plan_of(model, "sink_recent:4,16"));
      // The first 4 rows and the latest 16.
      const auto left = [](std::size_t text) {
        std::size_t rows = 0;
        for (std::size_t row = 0; row < text; ++row) rows += row < 4 || row + 16 >= text ? 1 : 0;
        return rows;
      };
      CHECK(footprint(*sequence, prompt, chunk, 30, false) ==
            doctest::Approx(by_hand(calls_of(prompt, chunk, 30), left)).epsilon(1e-12));
    }
  }
}

TEST_CASE("footprint: budgets count from the compression on, whoever has read the prompt") {
  const reference::Llama model = random_byte_model();
  constexpr std::size_t prompt = 131;
  const auto expected = [](std::size_t capacity, std::size_t decoded) {
    return by_hand(calls_of(prompt, prompt, decoded),
                   [&](std::size_t text) { return capacity + text - prompt; });
  };
  for (const char* name :
       {"snapkv:40", "adakv:40", "keydiff:40", "keydiff:40,compete=model", "criticalkv:40"}) {
    CAPTURE(name);
    const auto own = make_sequence(model, plan_of(model, name));
    CHECK(footprint(*own, prompt, 512, 0, false) == 1.0);
    const auto whole = own->fork();
    own->compress();
    const auto fork = own->fork();
    for (std::size_t i = 0; i < 17; ++i) static_cast<void>(own->decode(9));
    CHECK(own->footprint() == doctest::Approx(expected(40, 17)).epsilon(1e-12));
    // Forks go on by themselves.
    for (std::size_t i = 0; i < 3; ++i) static_cast<void>(fork->decode(9));
    CHECK(fork->footprint() == doctest::Approx(expected(40, 3)).epsilon(1e-12));
    static_cast<void>(whole->score(some_tokens(7)));
    CHECK(whole->footprint() == 1.0);
    // So does a plan for which another cache has read the prompt.
    PromptForks forks{model, some_tokens(prompt), Prefill::shared};
    const auto shared = forks.under({.name = name, .plan = plan_of(model, name), .compresses = true});
    CHECK(shared->footprint() == 1.0);
    shared->compress();
    for (std::size_t i = 0; i < 17; ++i) static_cast<void>(shared->decode(9));
    CHECK(shared->footprint() == doctest::Approx(expected(40, 17)).epsilon(1e-12));
  }
  // A head that compresses itself at each token holds its capacity and the token's own row.
  const auto h2o = make_sequence(model, plan_of(model, "h2o:40"));
  CHECK(footprint(*h2o, prompt, 512, 9, true) ==
        doctest::Approx(by_hand(calls_of(prompt, prompt, 9), [](std::size_t) { return 40U; })).epsilon(0.01));
}

TEST_CASE("footprint: repeating the prompt is time that rows are held") {
  const reference::Llama model = random_byte_model();
  constexpr std::size_t prompt = 150;
  for (const std::size_t part : {std::size_t{64}, std::size_t{100}, std::size_t{150}}) {
    CAPTURE(part);
    const auto sequence = make_sequence(model, plan_of(model, "kvzip:20"));
    const std::vector<int> tokens = some_tokens(prompt);
    static_cast<void>(sequence->prefill(tokens));
    sequence->score_rows(tokens, {{1, 2, 3}, {4, 5, 6, 7, 8}, part, 4});
    double sum = 0;
    for (std::size_t t = 1; t <= prompt; ++t) sum += static_cast<double>(t);
    const double full = sum;
    for (std::size_t first = 0; first < prompt; first += part) {
      // 3 words, or 5 and the 4 tokens before the part.
      std::size_t repeated = first == 0 ? 3 : 5 + 4;
      for (std::size_t i = first; i < prompt && i < first + part; ++i) ++repeated;
      for (std::size_t i = 1; i <= repeated; ++i) sum += static_cast<double>(prompt + i);
    }
    CHECK(sequence->footprint() == doctest::Approx(sum / full).epsilon(1e-12));
  }
}

TEST_CASE("footprint: evaluate reports it for each question and each text") {
  const auto model = random_text_model();
  SuiteConfig config;
  config.length = 512;
  config.questions = 2;
  config.per_text = 2;
  config.windows = 1;
  config.scored = 20;
  const std::vector<std::string> names{"full", "sink_recent:4,16", "snapkv:40"};
  std::vector<ExamPlan> made;
  for (const std::string& name : names) made.push_back(make_exam_plan(name, model.config().shape(), ""));
  const std::array<const ExamPlan*, 3> plans{&made[0], &made[1], &made[2]};
  const auto questions = draw_tasks(model, Suite::keys, config, 1, evaluation_text());
  const auto answered = perform(model, questions[0], plans, config, false);
  const auto texts = draw_tasks(model, Suite::perplexity, config, 1, evaluation_text());
  const auto continued = perform(model, texts[0], plans, config, false);
  for (std::size_t p = 0; p < plans.size(); ++p) {
    CAPTURE(names[p]);
    CHECK(answered[p].kv_footprint.size() == 2);
    REQUIRE(continued[p].kv_footprint.size() == 1);
  }
  CHECK(answered[0].kv_footprint == std::vector<double>{1, 1});
  CHECK(continued[0].kv_footprint == std::vector<double>{1});
  // 492 tokens, of which forks read the latest 64 but one, and the continuation's first 19 one by one.
  const auto left = [](std::size_t text) { return std::min<std::size_t>(text, 20); };
  std::vector<std::size_t> calls{491 - 64, 64};
  calls.insert(calls.end(), 20, 1);
  CHECK(continued[1].kv_footprint[0] == doctest::Approx(by_hand(calls, left)).epsilon(1e-12));
  const auto after_prompt = [&](std::size_t text) { return text <= 491 ? 40 : 40 + text - 491; };
  CHECK(continued[2].kv_footprint[0] ==
        doctest::Approx(by_hand(calls_of(491, 491, 20), after_prompt)).epsilon(1e-12));
  // An answer is 27 bytes, of which the last is not read again.
  CHECK(answered[2].kv_footprint[0] < 1.0);
  CHECK(answered[1].kv_footprint[0] < answered[2].kv_footprint[0]);
}
