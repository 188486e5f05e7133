// SPDX-License-Identifier: Apache-2.0
//
// The `--device` option of the tools: where a model runs, and how sequences are made there.
#pragma once

#include <string>

#include <CLI/CLI.hpp>

#include <reference_model/llama.hpp>

#include "sequence.hpp"

namespace kvpolicy::tools {

struct Device {
  std::string about;  ///< readable text: "2 threads", the name of a GPU
  MakeSequence make_sequence;
};

/// Adds --device cpu|cuda.
void add_device_option(CLI::App& app, std::string& device);

/// Prepares a model on a device. The model must outlive the Device, and the Device its sequences.
/// @throws ConfigError for "cuda" if this program was built without it, DeviceError if there is no
/// GPU
[[nodiscard]] Device open_device(const std::string& device, const reference::Llama& model);

}  // namespace kvpolicy::tools
