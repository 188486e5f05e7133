// SPDX-License-Identifier: Apache-2.0
#include <common/text_model.hpp>

#include <algorithm>
#include <array>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <common/asked_question.hpp>
#include <common/context_limit.hpp>
#include <common/exam.hpp>
#include <common/terminal.hpp>
#include <generate/new_text.hpp>
#include <identify/head_damage.hpp>
#include <identify/needles.hpp>
#include <identify/passkey_text.hpp>
#include <kvpolicy/core/error.hpp>

#include "byte_model.hpp"
#include "support/source_dir.hpp"

using namespace kvpolicy;
using namespace kvpolicy::tools;

namespace {

const std::array<TextModel, 2>& models() {
  static const std::array<TextModel, 2> made{random_text_model(), random_word_model()};
  return made;
}

std::string text_of(const TextModel& model, std::span<const int> tokens, std::size_t first,
                    std::size_t count) {
  return model.decode(tokens.subspan(first, count));
}

}  // namespace

TEST_CASE("a text model refuses the tokenizer of another model") {
  CHECK_THROWS_AS((TextModel{random_byte_model(64), reference::Tokenizer::bytes()}), FormatError);
  CHECK_THROWS_AS((TextModel{random_byte_model(5000), reference::Tokenizer::bytes()}), FormatError);
}

TEST_CASE("without a tokenizer, tokens are numbers and texts are refused") {
  const auto model = TextModel::load(testing::source_dir() + "/tests/model/goldens/gqa2_d80");
  CHECK(model.decode(std::array{1, 63, 2}) == "1 63 2 ");
  CHECK_THROWS_WITH_AS(static_cast<void>(model.encode("x")), doctest::Contains("vocabulary of 64"),
                       ConfigError);
}

TEST_CASE("what goes on after a text is encoded as both together") {
  for (const TextModel& model : models()) {
    for (const std::string before : {"In the beginning", "a key of ", "", "\u00fcber", "12"}) {
      for (const std::string more : {" of the", "the", "345", "\n\nYou", "\u4e16."}) {
        CAPTURE(before);
        CAPTURE(more);
        std::vector<int> tokens = model.encode(before);
        const std::vector<int> next = model.encode_after(before, more);
        tokens.insert(tokens.end(), next.begin(), next.end());
        CHECK(model.decode(tokens) == before + more);
      }
    }
  }
}

TEST_CASE("a token's text is what it adds to a text") {
  for (const TextModel& model : models()) {
    for (const int token : model.encode("In the beginning, 42 of\nthem")) {
      const std::array pair{token, token};
      CHECK(text_of_token(model.tokenizer(), token) + text_of_token(model.tokenizer(), token) ==
            model.decode(pair));
    }
    CHECK(model.tokens_with(".").size() >= 1);
    for (const int token : model.tokens_with("the")) {
      CHECK(model.decode(std::array{token}).find("the") != std::string::npos);
    }
  }
}

TEST_CASE("a new text ends with the first stop text, wherever tokens end") {
  std::mt19937 bits{11};
  for (const TextModel& model : models()) {
    for (int round = 0; round < 200; ++round) {
      std::string text;
      for (int i = 0; i < 30; ++i) text += std::array{"a", "b", ".", "\u00fc", " the", "12"}[bits() % 6];
      const std::string stop = std::array{".", "ab", "the.", "\u00fc", "2 t", "bb."}[bits() % 6];
      CAPTURE(text);
      CAPTURE(stop);
      const std::vector<int> tokens = model.encode(text);
      NewText fresh{model.tokenizer(), stop};
      const Stops stops = stops_at(model.tokenizer(), stop);
      std::string printed;
      std::size_t count = 0;
      bool stopped = false;
      for (const int token : tokens) {
        printed += fresh.add(token);
        if (!stopped) ++count;
        stopped = stopped || stops(std::span{tokens}.first(count));
        CHECK(fresh.stopped() == stopped);
      }
      printed += fresh.finish();
      const std::size_t found = text.find(stop);
      CHECK(printed == text.substr(0, found == std::string::npos ? found : found + stop.size()));
      CHECK(printed == fresh.text());
    }
  }
}

TEST_CASE("a terminal gets no control characters") {
  CHECK(printable("a\tb\n\x1b[31m\x7f\u0085\u00e9\u4e16") == "a\tb\n?[31m??\u00e9\u4e16");
}

TEST_CASE("a question and its answer are tokens of one text") {
  for (const TextModel& model : models()) {
    for (const bool lead_in : {false, true}) {
      RetrievalText text =
          draw_text_in_tokens(model, evaluation_text(), 700, {.questions = 3, .lead_in = lead_in});
      const EncodedText encoded{model, text};
      std::size_t longest = 0;
      for (std::size_t i = 0; i < text.questions.size(); ++i) {
        const AskedQuestion& asked = encoded.questions[i];
        longest = std::max(longest, asked.size());
        std::vector<int> tokens = encoded.body;
        tokens.insert(tokens.end(), asked.question().begin(), asked.question().end());
        tokens.insert(tokens.end(), asked.answer().begin(), asked.answer().end());
        CHECK(tokens == model.encode(text.body + text.questions[i].text + text.questions[i].answer));
        CHECK(asked.is_right(asked.answer()));
        CHECK(!asked.goes_on(asked.answer()));
        // The answer spelled in single bytes takes more tokens and is as right.
        std::vector<int> spelled;
        for (const char c : model.decode(asked.answer())) {
          const std::vector<int> one = model.encode_after({}, std::string(1, c));
          spelled.insert(spelled.end(), one.begin(), one.end());
        }
        for (std::size_t n = 0; n < spelled.size(); ++n) {
          CHECK(asked.goes_on(std::span{spelled}.first(n)));
        }
        CHECK(asked.is_right(spelled));
        CHECK(!asked.goes_on(spelled));
        // Another text is wrong, and nobody waits for its end.
        std::vector<int> wrong = asked.answer();
        wrong.front() = model.encode_after({}, "?").front();
        CHECK(asked.mark(wrong) == '0');
        CHECK(!asked.goes_on(wrong));
      }
      CHECK(encoded.body.size() + longest <= 700);
      CHECK(encoded.body.size() + longest >= 679);
    }
  }
}

TEST_CASE("to a model that reads bytes, texts of so many tokens are texts of so many bytes") {
  const TextModel& bytes = models()[0];
  const std::string plain = evaluation_text();
  for (const std::uint64_t seed : {1U, 2U, 3U}) {
    const RetrievalText drawn =
        draw_text_in_tokens(bytes, plain, 1000, {.questions = 2, .two_step = true, .seed = seed});
    const RetrievalText expected =
        draw_text(plain, {.length = 1000, .questions = 2, .two_step = true, .seed = seed});
    CHECK(drawn.body == expected.body);
    CHECK(bytes.decode(draw_plain_tokens(bytes, plain, 500, {.seed = seed})) ==
          draw_plain_text(plain, {.length = 500, .seed = seed}).body);
  }
}

TEST_CASE("the other name's answer is marked") {
  for (const TextModel& model : models()) {
    const RetrievalText text =
        draw_text_in_tokens(model, evaluation_text(), 900, {.questions = 1, .two_step = true});
    Question swapped = text.questions[0];
    std::swap(swapped.answer, swapped.other);
    const AskedQuestion asked{model, text.body, text.questions[0]};
    const AskedQuestion of_other{model, text.body, swapped};
    CHECK(asked.mark(asked.answer()) == '1');
    CHECK(asked.mark(of_other.answer()) == 'o');
  }
}

TEST_CASE("a model of words is examined, and a window changes its answers") {
  const TextModel& model = models()[1];
  const ModelShape shape = model.config().shape();
  const std::vector<RetrievalText> texts{
      draw_text_in_tokens(model, evaluation_text(), 512, {.questions = 2})};
  const ExamResult full = examine(model, make_exam_plan("full", shape, ""), texts);
  CHECK(agreement(examine(model, make_exam_plan("quest:16,1024", shape, ""), texts), full) == 1.0);
  CHECK(agreement(examine(model, make_exam_plan("sink_recent:4,8", shape, ""), texts), full) < 1.0);
  CHECK(loss_under(model, HeadPlan<bfloat16>{shape}, texts).sum() > 0);
}

TEST_CASE("needles and passkeys are where their tokens say") {
  const std::string plain = identification_text();
  for (const TextModel& model : models()) {
    const auto sample = draw_needle(model, plain, {.length = 900, .depth = 0.4});
    sample.check();
    CHECK(text_of(model, sample.prompt, sample.needle, sample.needle_tokens) ==
          model.decode(sample.answer).substr(model.config().vocabulary == 256 ? 0 : 1));
    const auto text = passkey_text(model, plain, {.context = 2000, .seed = 2}, 3);
    text.check();
    CHECK(text.tokens.size() <= 2000);
    REQUIRE(text.passkeys.size() == 10);
    for (const reference::Passkey& key : text.passkeys) {
      const std::string hidden = text_of(model, text.tokens, key.hidden, key.tokens);
      CHECK(hidden == text_of(model, text.tokens, key.answer, key.tokens));
      CHECK(hidden.find_first_not_of("0123456789") == std::string::npos);
      CHECK(hidden.size() == 5);
    }
  }
}

TEST_CASE("a prompt beyond the context is refused with what would fit") {
  reference::LlamaConfig config;
  ContextLimit limit;
  CHECK_NOTHROW(limit.check(config, 1'000'000));  // the model does not say
  config.max_positions = 8192;
  CHECK_NOTHROW(limit.check(config, 8192));
  CHECK_THROWS_WITH_AS(limit.check(config, 9000), doctest::Contains("shorten it by 808 tokens"), ConfigError);
  limit.beyond = true;
  CHECK_NOTHROW(limit.check(config, 9000));
}
