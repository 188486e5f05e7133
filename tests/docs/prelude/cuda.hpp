// SPDX-License-Identifier: Apache-2.0
//
// Names that fragments about the device may use. They are compiled with the host emulation of the tests,
// whose cuda_runtime_api.h replaces that of the toolkit.
// needs: simt
#define KVPOLICY_CUDA_HEAD_DIMS 64
#include <kvpolicy/cuda.hpp>
#include <kvpolicy/duo.hpp>
// each block
struct Engine {
  kvpolicy::HeadPlan<kvpolicy::float16> plan;
  cudaStream_t stream = nullptr;
  cudaGraphExec_t decode_step = nullptr;
  std::size_t longest_text = 0;
  std::size_t layer = 0;
  kvpolicy::TensorView<const kvpolicy::float16> q, k, v;
  kvpolicy::TensorView<kvpolicy::float16> out;

  void run() { BLOCK }
};
