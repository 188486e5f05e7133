// SPDX-License-Identifier: Apache-2.0
//
// Finds the files that say what is known about a model's heads: gates (duo/), HeadKV's scores
// (headkv/retrieval_heads.json), damages (damage.json).
#pragma once

#include <filesystem>
#include <string>

namespace kvpolicy::tools {

/// `name` beside the model's weights, or else in the repository's folder for models of this name:
/// "duo" of models/smollm2 may lie in models/smollm2/duo or reference_model/weights/smollm2/duo.
/// Returns the first of both where neither exists.
[[nodiscard]] std::filesystem::path head_file(const std::filesystem::path& model,
                                              const std::filesystem::path& name);

/// The same. @throws FormatError that says where it was searched, how `identify_heads` makes it, and
/// which plans need nothing
[[nodiscard]] std::filesystem::path require_head_file(const std::filesystem::path& model,
                                                      const std::filesystem::path& name);

}  // namespace kvpolicy::tools
