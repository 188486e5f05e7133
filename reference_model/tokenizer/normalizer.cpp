// SPDX-License-Identifier: Apache-2.0
#include <reference_model/tokenizer/normalizer.hpp>

#include <utility>

#include <reference_model/tokenizer/pre_tokenizer.hpp>

namespace kvpolicy::reference {

Normalizer::Normalizer(const std::vector<NormalizerStep>& steps, std::string_view origin) {
  for (const NormalizerStep& step : steps) {
    std::optional<Pattern> pattern;
    if (step.is_regex) pattern.emplace(step.pattern, origin);
    steps_.push_back({step, std::move(pattern)});
  }
}

std::string Normalizer::apply(std::string_view text) const {
  std::string out{text};
  for (const auto& [what, pattern] : steps_) {
    using Kind = NormalizerStep::Kind;
    switch (what.kind) {
      case Kind::prepend:
        if (!out.empty()) out.insert(0, what.content);
        break;
      case Kind::replace:
        out = pattern ? pattern->replaced(out, what.content) : with_replaced(out, what.pattern, what.content);
        break;
      case Kind::nfc: out = normalized(out, NormalForm::nfc); break;
      case Kind::nfd: out = normalized(out, NormalForm::nfd); break;
      case Kind::nfkc: out = normalized(out, NormalForm::nfkc); break;
      case Kind::nfkd: out = normalized(out, NormalForm::nfkd); break;
    }
  }
  return out;
}

}  // namespace kvpolicy::reference
