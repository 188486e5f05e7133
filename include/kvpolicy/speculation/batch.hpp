// SPDX-License-Identifier: Apache-2.0
//
// Several texts at once. Each text has its own decoder, cache and draft, and accepts its own number
// of draft tokens. The texts share only the target's verification pass, which reads the weights
// once for all of them if the model can (BatchedLanguageModel). A text may join or leave between
// steps.
#pragma once

#include <algorithm>
#include <cstddef>
#include <exception>
#include <span>
#include <type_traits>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/speculation/decoder.hpp>
#include <kvpolicy/speculation/language_model.hpp>

namespace kvpolicy {

/// The result of one text in a step of several texts.
struct BatchedStep {
  DecodedStep step;
  std::exception_ptr error;  ///< concerns only this text, which is then unchanged
};

/// One step of each text that has not ended. All decoders use `model`; the result is [decoders].
/// Not synchronised.
/// @throws what the model's common call throws; all texts are then unchanged
template <class Model, class Decoder>
std::vector<BatchedStep> step_together(Model& model, std::span<Decoder* const> decoders,
                                       std::size_t max_tokens = static_cast<std::size_t>(-1)) {
  using Cache = std::remove_reference_t<decltype(decoders.front()->cache())>;
  for (std::size_t i = 0; i < decoders.size(); ++i) {
    require(std::ranges::find(decoders.begin() + static_cast<std::ptrdiff_t>(i) + 1, decoders.end(),
                              decoders[i]) == decoders.end(),
            "step_together: decoder ", i, " is listed twice, must be a text of its own");
  }
  std::vector<BatchedStep> results(decoders.size());
  std::vector<std::size_t> begun;
  std::vector<BatchCall<Cache>> calls;
  begun.reserve(decoders.size());
  calls.reserve(decoders.size());
  for (std::size_t i = 0; i < decoders.size(); ++i) {
    KVPOLICY_TRY {
      if (!decoders[i]->begin(max_tokens)) {
        results[i].step.ending = decoders[i]->ending();
        continue;
      }
      calls.push_back({&decoders[i]->cache(), decoders[i]->call()});
      begun.push_back(i);
    }
    KVPOLICY_CATCH_ALL { results[i].error = std::current_exception(); }
  }
  if (begun.empty()) return results;
  std::vector<std::vector<float>> logits;
  KVPOLICY_TRY {
    if constexpr (BatchedLanguageModel<Model, Cache>) {
      logits = model.read_batch(std::span<const BatchCall<Cache>>{calls});
    } else {
      for (const BatchCall<Cache>& call : calls) logits.push_back(model.read(*call.cache, call.call));
    }
    require<ShapeError>(logits.size() == calls.size(), "LanguageModel: gave logits of ", logits.size(),
                        " calls, must be those of all ", calls.size());
  }
  KVPOLICY_CATCH_ALL {
    for (const std::size_t i : begun) decoders[i]->abandon();
    KVPOLICY_RETHROW;
  }
  for (std::size_t c = 0; c < begun.size(); ++c) {
    BatchedStep& result = results[begun[c]];
    KVPOLICY_TRY { result.step = decoders[begun[c]]->conclude(logits[c]); }
    KVPOLICY_CATCH_ALL { result.error = std::current_exception(); }
  }
  return results;
}

}  // namespace kvpolicy
