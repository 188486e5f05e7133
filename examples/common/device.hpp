// SPDX-License-Identifier: Apache-2.0
//
// The `--device` of the tools: where a model runs, and how sequences over it are made there.
#pragma once

#include <string>

#include <CLI/CLI.hpp>

#include <reference_model/llama.hpp>

#include "sequence.hpp"

namespace kvpolicy::tools {

struct Device {
  std::string about;  ///< for people: "2 threads", the name of a GPU
  MakeSequence make_sequence;
};

/// Adds --device cpu|cuda.
void add_device_option(CLI::App& app, std::string& device);

/// A model made ready on a device. The model must outlive it, it must outlive its sequences.
/// @throws ConfigError for "cuda" if this program was built without, DeviceError if there is none
[[nodiscard]] Device open_device(const std::string& device, const reference::Llama& model);

}  // namespace kvpolicy::tools
