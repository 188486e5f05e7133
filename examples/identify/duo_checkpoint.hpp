// SPDX-License-Identifier: Apache-2.0
//
// Where a training of gates stands, in a file: it goes on from there to the very numbers that it
// would have come to without a stop.
#pragma once

#include <string>
#include <vector>

#include <kvpolicy/io/json_text.hpp>
#include <reference_model/identify/duo_gates.hpp>

namespace kvpolicy::tools {

/// A checkpoint: the state, and the settings that it belongs to.
struct DuoCheckpoint {
  reference::GateState state;
  io::Json settings;
  std::vector<double> losses;     ///< of each step made
  std::vector<double> penalties;  ///< the same
};

/// Written as a whole or not at all. @throws StorageError naming the file.
void save_checkpoint(const std::string& path, const DuoCheckpoint& checkpoint);

/// @throws FormatError if there is none, it is damaged, or it belongs to other settings than these:
/// the first that differs is named.
[[nodiscard]] DuoCheckpoint load_checkpoint(const std::string& path, const io::Json& settings);

}  // namespace kvpolicy::tools
