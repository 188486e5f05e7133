// SPDX-License-Identifier: Apache-2.0
//
// A cache that is fed turn by turn must hold the tokens of the whole conversation.
#include <generate/conversation.hpp>

#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/core/error.hpp>

#include "byte_model.hpp"

using namespace kvpolicy;
using namespace kvpolicy::tools;

TEST_CASE("the turns of a conversation join to the text of its template") {
  const TextModel model = chatting_model();
  const std::vector<std::string> asked{"You are of the Work", "  <|im_end|> 42?", "the\nend"};
  const std::vector<std::string> said{" The Licen", "\nof the  ", ""};
  for (const std::string system : {"", "Be in the Work."}) {
    Conversation conversation{model, system};
    std::vector<int> held;
    std::vector<reference::ChatMessage> messages;
    if (!system.empty()) messages.push_back({"system", system});
    for (std::size_t turn = 0; turn < asked.size(); ++turn) {
      const Conversation::Prompt prompt = conversation.ask(asked[turn]);
      CHECK(prompt.from_start == (turn == 0));
      held.insert(held.end(), prompt.tokens.begin(), prompt.tokens.end());
      messages.push_back({"user", asked[turn]});
      CHECK(held == reference::ChatTemplate{model.tokenizer()}.encode(messages));
      const std::vector<int> answer = model.encode_after({}, said[turn]);
      held.insert(held.end(), answer.begin(), answer.end());
      conversation.answered(said[turn]);
      messages.push_back({"assistant", said[turn]});
    }
  }
}

TEST_CASE("a model without a chat template has no conversation") {
  const TextModel model = random_word_model();
  CHECK_THROWS_AS((Conversation{model, ""}), FormatError);
}
