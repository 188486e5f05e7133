// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include <reference_model/llama.hpp>

namespace kvpolicy::reference {

/// Tells a model from others that may stand in the same folder under the same name: all that its rows and logits depend on, which are
/// its weights as they are kept in memory, and its config. Reads every weight once, in all threads: some seconds for a model of 8 billion.
[[nodiscard]] std::uint64_t digest_of(const Llama& model);

}  // namespace kvpolicy::reference
