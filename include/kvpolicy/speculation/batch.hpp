// SPDX-License-Identifier: Apache-2.0
//
// Several texts at once. Each has its own decoder, cache and draft and accepts as many guesses as it
// does; they meet only in the target's verification, whose weights are read once for all where the
// model can (BatchedLanguageModel). A text may join or leave between any two steps.
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

/// What became of one text in a step of several.
struct BatchedStep {
  DecodedStep step;
  std::exception_ptr error;  ///< of this text alone: its draft's or its logits'; it has not moved on
};

/// One step of each text that has not ended: [decoders]. All decoders use `model`. Not synchronised.
/// @throws what the model's common call throws; no text has moved on then
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
    KVPOLICY_CATCH_ALL {
      results[i].error = std::current_exception();
    }
  }
  if (begun.empty()) return results;
  std::vector<std::vector<float>> logits;
  KVPOLICY_TRY {
    if constexpr (BatchedLanguageModel<Model, Cache>) {
      logits = model.read_batch(std::span<const BatchCall<Cache>>{calls});
    } else {
      for (const BatchCall<Cache>& call : calls) logits.push_back(model.read(*call.cache, call.call));
    }
    require<ShapeError>(logits.size() == calls.size(), "LanguageModel: gave logits of ",
                        logits.size(), " calls, must be those of all ", calls.size());
  }
  KVPOLICY_CATCH_ALL {
    for (const std::size_t i : begun) decoders[i]->abandon();
    KVPOLICY_RETHROW;
  }
  for (std::size_t c = 0; c < begun.size(); ++c) {
    BatchedStep& result = results[begun[c]];
    KVPOLICY_TRY {
      result.step = decoders[begun[c]]->conclude(logits[c]);
    }
    KVPOLICY_CATCH_ALL {
      result.error = std::current_exception();
    }
  }
  return results;
}

}  // namespace kvpolicy
