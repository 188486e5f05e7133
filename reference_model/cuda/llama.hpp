// SPDX-License-Identifier: Apache-2.0
//
// The forward pass of the Llama family on a GPU: bfloat16 weights and activations; sums, norms and
// the residual stream in float. Like reference::Llama it holds no cache: attention is a callback
// that gets tensors in device memory. run.hpp connects it to a gpu::KvCache.
//
// All work is put on a stream, and only functions that return numbers to the host wait for it.
// Tokens and position are read from device memory, so a pass can be captured in a CUDA graph and
// replayed: each replay reads the token that the one before it chose.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/core/tensor_view.hpp>
#include <kvpolicy/cuda/memory.hpp>
#include <reference_model/config.hpp>
#include <reference_model/cuda/device_sampler.hpp>
#include <reference_model/cuda/kernels/choices.cuh>
#include <reference_model/cuda/matmul.hpp>
#include <reference_model/llama.hpp>

namespace kvpolicy::reference {

/// Puts one layer's attention on the stream: q [tokens, q_heads, head_dim], k and v [tokens,
/// kv_heads, head_dim], rotated to their text positions, in device memory; out is shaped like q.
/// Called once per layer in ascending order; forward() passes on what it throws.
using DeviceAttendFn =
    std::function<void(std::size_t layer, TensorView<const bfloat16> q, TensorView<const bfloat16> k,
                       TensorView<const bfloat16> v, TensorView<bfloat16> out, cudaStream_t stream)>;

struct CudaLlamaOptions {
  /// The format of the layers' weights. Embedding and output layer are always bfloat16.
  WeightFormat weights = WeightFormat::bfloat16;
  gpu::MemoryResource* memory = gpu::default_memory();  ///< must outlive the model
};

/// Not thread-safe; meant for one stream at a time. Belongs to the device that was current at
/// construction.
class CudaLlama {
 public:
  /// Copies the weights of a model, rounded to bfloat16.
  /// @throws ConfigError for a shape that the kernels do not serve (head_dim must be a multiple of
  /// 8, the MLP's width of 2), DeviceError without a fitting device, std::bad_alloc
  explicit CudaLlama(const Llama& model, const CudaLlamaOptions& options = {}, cudaStream_t stream = nullptr);

  /// Makes random weights on the device, for benches. @throws as the constructor
  [[nodiscard]] static CudaLlama random(const LlamaConfig& config, const CudaLlamaOptions& options = {},
                                        std::uint64_t seed = 1, cudaStream_t stream = nullptr);

  [[nodiscard]] const LlamaConfig& config() const noexcept { return config_; }
  [[nodiscard]] std::size_t weight_bytes() const noexcept { return weight_bytes_; }
  /// Bytes of activations, logits and the workspace of products.
  [[nodiscard]] std::size_t activation_bytes() const;

  /// Allocates buffers for calls of `rows` tokens that return logits of `logit_rows` tokens; no
  /// smaller call allocates memory after that. If the buffers grow, tokens that were set or chosen
  /// are lost and graphs captured before are invalid. @throws std::bad_alloc
  void reserve(std::size_t rows, std::size_t logit_rows = 1, cudaStream_t stream = nullptr);

  /// Changes when the buffers grow, so that owners of graphs can see that these are invalid.
  [[nodiscard]] std::size_t room_version() const noexcept { return room_version_; }

  /// Sets the tokens that the next forward reads, and the position of the first of them.
  /// @throws ShapeError for no tokens, more than reserved, or one outside the vocabulary
  void set_tokens(std::span<const int> tokens, std::size_t first_position, cudaStream_t stream = nullptr);
  /// The same for tokens at any positions, as in a token tree.
  /// @throws ShapeError also if there are not as many positions as tokens
  void set_tokens(std::span<const int> tokens, std::span<const std::size_t> positions,
                  cudaStream_t stream = nullptr);

  /// Runs the forward pass over the first `rows` tokens that were set, and advances the position.
  /// Can be captured.
  /// @throws ShapeError for more rows or logits than reserved, DeviceError, what `attend` throws
  void forward(std::size_t rows, const DeviceAttendFn& attend, LogitsOf logits = LogitsOf::last,
               cudaStream_t stream = nullptr);

  /// Logits of the latest forward, in device memory: [0, 1 or rows, vocabulary].
  [[nodiscard]] const float* logits() const { return logits_of(0); }

  /// Chooses the likeliest token by the last logits of the latest forward, records it, and sets it
  /// as the token that the next forward reads. Can be captured.
  void choose_likeliest(cudaStream_t stream = nullptr);
  /// The same with a token that `sampler` draws. @throws ShapeError for a sampler of another vocabulary
  void choose(DeviceSampler& sampler, cudaStream_t stream = nullptr);
  /// Returns the tokens chosen since the last call, and waits for the stream.
  /// @throws ShapeError if the logits of a token had a NaN or an infinity, CapacityError if there
  /// were more than `most_choices`
  [[nodiscard]] std::vector<int> take_choices(cudaStream_t stream = nullptr);
  static constexpr std::size_t most_choices = std::size_t{1} << 16;

  /// Sets the tokens, allocates, runs and waits, for callers on the host. Returns logits [0, 1 or
  /// tokens, vocabulary].
  [[nodiscard]] std::vector<float> forward(std::span<const int> tokens, std::size_t first_position,
                                           const DeviceAttendFn& attend, LogitsOf logits = LogitsOf::last,
                                           cudaStream_t stream = nullptr);
  /// Copies the latest forward's logits to the host, and waits for the stream.
  [[nodiscard]] std::vector<float> download_logits(cudaStream_t stream = nullptr) const;

 private:
  struct Layer {
    gpu::DeviceBuffer attention_norm;  // [hidden], float
    DeviceLinear qkv, o;
    gpu::DeviceBuffer mlp_norm;
    DeviceLinear gate_up, down;
  };
  // Buffers for the activations of a call. Those of the MLP, which are the widest, only hold a
  // block of rows.
  struct Room {
    std::size_t rows = 0;
    std::size_t mlp_rows = 0;
    std::size_t logit_rows = 0;
    std::size_t bytes = 0;
    gpu::DeviceBuffer memory = {};
    int* tokens = nullptr;     // [rows]
    int* offsets = nullptr;    // [rows], distances of positions from the first one
    float* cosines = nullptr;  // [rows, head_dim / 2]
    float* sines = nullptr;
    float* residual = nullptr;          // [rows, hidden]
    std::uint16_t* normed = nullptr;    // [rows, hidden]
    std::uint16_t* qkv = nullptr;       // [rows, q | k | v]
    std::uint16_t* attended = nullptr;  // [rows, q_heads * head_dim]
    std::uint16_t* gate_up = nullptr;   // [mlp_rows, 2 * intermediate]
    std::uint16_t* gated = nullptr;     // [mlp_rows, intermediate]
    float* logits = nullptr;            // [logit_rows, vocabulary]
  };
  // State that lasts from call to call, in device memory.
  struct Progress {
    int position;
    int choices;
  };

  CudaLlama(const LlamaConfig& config, const CudaLlamaOptions& options, cudaStream_t stream);
  void count_weights();
  [[nodiscard]] Room lay_out(std::size_t rows, std::size_t logit_rows, std::byte* start) const;
  [[nodiscard]] const float* logits_of(std::size_t row) const {
    return room_.logits + row * config_.vocabulary;
  }
  [[nodiscard]] std::size_t qkv_width() const {
    return (config_.q_heads + 2 * config_.kv_heads) * config_.head_dim;
  }
  [[nodiscard]] const DeviceLinear& head() const { return config_.tied_embeddings ? embedding_ : head_; }
  [[nodiscard]] Progress* progress() const { return reinterpret_cast<Progress*>(progress_.get()); }
  [[nodiscard]] int* chosen() const { return reinterpret_cast<int*>(progress() + 1); }
  [[nodiscard]] gpu::llama::Choices choices() const {
    return {.token = room_.tokens,
            .chosen = chosen(),
            .count = &progress()->choices,
            .capacity = static_cast<int>(most_choices)};
  }

  void put_tokens(std::span<const int> tokens, std::size_t position, cudaStream_t stream);
  void count_offsets(cudaStream_t stream);
  void embed(std::size_t rows, cudaStream_t stream);
  void norm(const gpu::DeviceBuffer& weight, const float* x, std::size_t rows, cudaStream_t stream);
  void before_attention(const Layer& layer, std::size_t rows, cudaStream_t stream);
  void after_attention(const Layer& layer, std::size_t rows, cudaStream_t stream);

  LlamaConfig config_;
  CudaLlamaOptions options_;
  Matmul matmul_;
  gpu::DeviceBuffer inverse_frequencies_;  // [head_dim / 2], float
  gpu::DeviceBuffer progress_;             // Progress, then the choices
  DeviceLinear embedding_;                 // its weight is gathered from, not multiplied
  std::vector<Layer> layers_;
  gpu::DeviceBuffer norm_;
  DeviceLinear head_;  // unless embeddings are tied
  std::size_t weight_bytes_ = 0;
  Room room_;
  std::size_t room_version_ = 0;
  std::size_t logit_rows_ = 0;  // of the latest forward
  bool branched_ = false;       // the offsets are a tree's
};

}  // namespace kvpolicy::reference
