// SPDX-License-Identifier: Apache-2.0
//
// Sequences of a model on a GPU. Exists only in builds with CUDA; tools use device.hpp.
#pragma once

#include <reference_model/llama.hpp>

#include "device.hpp"

namespace kvpolicy::tools {

/// Copies the model's weights to the current CUDA device. @throws DeviceError, std::bad_alloc
[[nodiscard]] Device open_cuda_device(const reference::Llama& model);

}  // namespace kvpolicy::tools
