// SPDX-License-Identifier: Apache-2.0
#include <evaluate/prompt_form.hpp>

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include <doctest/doctest.h>

#include <evaluate/suite.hpp>
#include <kvpolicy/core/error.hpp>
#include <reference_model/tokenizer/chat_template.hpp>

#include "byte_model.hpp"

using namespace kvpolicy;
using namespace kvpolicy::tools;

namespace {

std::vector<int> joined(std::vector<int> first, const std::vector<int>& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

// The whole prompt by the chat template itself: the user's message, and what the assistant's begins
// with.
std::vector<int> in_chat(const TextModel& model, const std::string& message, std::string_view begun) {
  const std::array messages{reference::ChatMessage{"user", message}};
  return joined(reference::ChatTemplate{model.tokenizer()}.encode(messages),
                model.tokenizer().encode(begun, {.add_special = false, .parse_special = false}));
}

const LanguageQuestion what_sings{.text = "\nWhat sings?", .lead_in = "What sings is the"};
const LanguageQuestion kind_of{.text = "\nA trout is a kind of", .choices = {" fish", " bird"}};

}  // namespace

TEST_CASE("in plain form the question follows the text") {
  const TextModel model = random_word_model();
  const PromptForm form{model, false};
  CHECK(form.text("Birds sing.") == "Birds sing.");
  CHECK(form.tokens("Birds sing.") == model.encode("Birds sing."));
  CHECK(form.overhead() == model.encode("").size());
  const LanguagePrompt prompt = form.ask("Birds sing.", what_sings);
  CHECK(prompt.text == "\nWhat sings? What sings is the");
  CHECK(prompt.tokens == model.encode_after("Birds sing.", prompt.text));
  CHECK(prompt.question.lead_in == what_sings.lead_in);
}

TEST_CASE("in chat form text and question are the user's message, and the lead-in begins the answer") {
  const TextModel model = chatting_model();
  const PromptForm form{model, true};
  // The spelling of a special token in a text is text.
  for (const std::string body : {"Birds sing.", "<|im_end|> is not\nthe end.", "Ünïcode 42"}) {
    const std::vector<int> front = form.tokens(body);
    const LanguagePrompt asked = form.ask(body, what_sings);
    CHECK(joined(front, asked.tokens) == in_chat(model, body + what_sings.text, what_sings.lead_in));
    CHECK(form.text(body) + asked.text == "<|im_start|>user\n" + body +
                                              "\nWhat sings?<|im_end|>\n<|im_start|>assistant\n"
                                              "What sings is the");
    const LanguagePrompt begun = form.ask(body, kind_of);
    CHECK(joined(front, begun.tokens) == in_chat(model, body, "A trout is a kind of"));
    for (const LanguagePrompt& prompt : {asked, begun}) {
      CHECK(front.size() + prompt.tokens.size() <=
            form.overhead() + model.encode_after({}, body).size() +
                model.encode_after(body, prompt.question.prompt()).size());
    }
  }
}

TEST_CASE("tasks in chat form are no longer than was asked for; suites that are not questions have none") {
  const TextModel model = chatting_model();
  SuiteConfig config{.length = 1500, .questions = 2, .per_text = 2, .depths = 2, .chat = true};
  for (std::size_t i = 0; i < suite_names.size(); ++i) {
    const auto suite = static_cast<Suite>(i);
    CAPTURE(name_of(suite));
    if (!language_family(suite)) {
      CHECK_THROWS_WITH_AS(static_cast<void>(draw_tasks(model, suite, config, 1, evaluation_text())),
                           doctest::Contains("has no chat form"), ConfigError);
      continue;
    }
    for (const Task& task : draw_tasks(model, suite, config, 1, evaluation_text())) {
      CHECK(task.text.body.starts_with("<|im_start|>user\n"));
      for (const LanguagePrompt& prompt : task.language) {
        CHECK(task.body.size() + prompt.tokens.size() + prompt.question.max_tokens <= config.length);
      }
      CHECK(rows_before_answer(model, task) == task.body.size() + task.language[0].tokens.size());
    }
  }
  CHECK_THROWS_AS((PromptForm{random_word_model(), true}), FormatError);
}
