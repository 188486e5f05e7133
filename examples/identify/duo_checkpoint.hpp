// SPDX-License-Identifier: Apache-2.0
//
// The state of a training of gates in a file. A training that continues from it ends at exactly the
// numbers of a training without a stop.
#pragma once

#include <string>
#include <vector>

#include <kvpolicy/io/json_text.hpp>
#include <reference_model/identify/duo_gates.hpp>

namespace kvpolicy::tools {

/// A checkpoint: the state of a training, and the settings that it belongs to.
struct DuoCheckpoint {
  reference::GateState state;
  io::Json settings;
  std::vector<double> losses;     ///< one for each step made
  std::vector<double> penalties;  ///< one for each step made
};

/// Writes the file as a whole or not at all. @throws StorageError naming the file
void save_checkpoint(const std::string& path, const DuoCheckpoint& checkpoint);

/// @throws FormatError if there is no file, if it is damaged, or if it belongs to other settings;
/// the first setting that differs is named
[[nodiscard]] DuoCheckpoint load_checkpoint(const std::string& path, const io::Json& settings);

}  // namespace kvpolicy::tools
