// SPDX-License-Identifier: Apache-2.0
//
// Sequences of a model on a GPU. Only in builds with CUDA; device.hpp is what tools ask.
#pragma once

#include <reference_model/llama.hpp>

#include "device.hpp"

namespace kvpolicy::tools {

/// The model's weights go to the current CUDA device. @throws DeviceError, std::bad_alloc
[[nodiscard]] Device open_cuda_device(const reference::Llama& model);

}  // namespace kvpolicy::tools
