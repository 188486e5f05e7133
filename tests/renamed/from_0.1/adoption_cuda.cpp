// SPDX-License-Identifier: Apache-2.0
//
// Names that fragments about the device may use. They are compiled with the host emulation of the tests,
// whose cuda_runtime_api.h replaces that of the toolkit.
// needs: simt
#define KVPOLICY_CUDA_HEAD_DIMS 64
#include <kvpolicy/cuda.hpp>
#include <kvpolicy/duo.hpp>
namespace block_12 {
struct Engine {
  kvpolicy::HeadPlan<kvpolicy::half> plan;
  cudaStream_t stream = nullptr;
  cudaGraphExec_t decode_step = nullptr;
  std::size_t longest_text = 0;
  std::size_t layer = 0;
  kvpolicy::TensorView<const kvpolicy::half> q, k, v;
  kvpolicy::TensorView<kvpolicy::half> out;

  void run() {
    kvpolicy::cuda::KvCache cache{plan, {.max_rollback = 8}, stream};
    cache.reserve(longest_text, stream);          // from here on a step asks for no memory
    cache.step(layer, q, k, v, out, {}, stream);  // device tensors; attention, then the rows are kept
    cache.replayed();                             // before each launch of a captured step
    cudaGraphLaunch(decode_step, stream);
  }
};

}  // namespace block_12
