// SPDX-License-Identifier: Apache-2.0
//
// How a text and a question about it become what a model reads: one after the other, or, for models
// that were tuned on conversations, as the user's message with the answer as the assistant's.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "../common/text_model.hpp"
#include "../tasks/language_task.hpp"

namespace kvpolicy::tools {

/// A question as the model reads it after the body.
struct LanguagePrompt {
  LanguageQuestion question;
  std::string text = {};         ///< With the markup of a conversation, where it is one.
  std::vector<int> tokens = {};  ///< Of that text.
};

class PromptForm {
 public:
  /// `model` must outlive this object.
  /// @throws FormatError as reference::ChatTemplate, if `chat`
  PromptForm(const TextModel& model, bool chat);

  /// What the model reads first, whatever it is asked: the body, in a conversation after the
  /// template's system message and the opening of the user's.
  [[nodiscard]] std::string text(std::string_view body) const;
  [[nodiscard]] std::vector<int> tokens(std::string_view body) const;

  /// The rest of the prompt. In a conversation the user's message ends with the question, and the
  /// assistant's begins with the question's lead-in. A question without a lead-in is a sentence that
  /// the answer finishes; the assistant's message begins with it.
  [[nodiscard]] LanguagePrompt ask(std::string_view body, LanguageQuestion question) const;

  /// Tokens that a prompt has, at most, besides those of the body and of `LanguageQuestion::prompt`.
  [[nodiscard]] std::size_t overhead() const;

 private:
  // The markup around a user's only message.
  struct Markup {
    std::string before;
    std::string after;
  };
  // A text whose special tokens stand outside of the messages only.
  struct Written {
    std::string text;
    std::vector<reference::ByteRange> literal;
    void add_markup(std::string_view more) { text += more; }
    void add_content(std::string_view more);
  };

  [[nodiscard]] static Markup markup_of(const TextModel& model);
  [[nodiscard]] Written opened(std::string_view body) const;
  [[nodiscard]] std::vector<int> encode(const Written& written, std::size_t first = 0) const;

  const TextModel* model_;
  std::optional<Markup> chat_;
};

}  // namespace kvpolicy::tools
