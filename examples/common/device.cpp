// SPDX-License-Identifier: Apache-2.0
#include "device.hpp"

#include <utility>

#include <fmt/format.h>

#include <kvpolicy/core/error.hpp>

#ifdef KVPOLICY_TOOLS_WITH_CUDA
#include "cuda_sequence.hpp"
#endif

namespace kvpolicy::tools {

void add_device_option(CLI::App& app, std::string& device) {
  app.add_option("--device", device, "Where the model runs: cpu, or cuda (an NVIDIA GPU)")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->type_name("DEVICE")
      ->capture_default_str();
}

Device open_device(const std::string& device, const reference::Llama& model) {
  if (device == "cpu") {
    return {
        .about = fmt::format("{} threads", threads()),
        .make_sequence = [&model](HeadPlan<bfloat16> plan) { return make_sequence(model, std::move(plan)); }};
  }
#ifdef KVPOLICY_TOOLS_WITH_CUDA
  return open_cuda_device(model);
#else
  throw ConfigError{
      "this program was built without CUDA: configure it again where CMake finds a CUDA toolkit "
      "(nvcc on the PATH, or CUDACXX), or leave --device at cpu"};
#endif
}

}  // namespace kvpolicy::tools
