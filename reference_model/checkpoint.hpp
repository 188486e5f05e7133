// SPDX-License-Identifier: Apache-2.0
//
// Where weights come from, and the usual case: a Hugging Face folder with one model.safetensors, or with
// shards named by model.safetensors.index.json.
#pragma once

#include <cstddef>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <reference_model/safetensors.hpp>

namespace kvpolicy::reference {

/// Tensors under the names that Hugging Face's Llama models have.
class WeightSource {
 public:
  virtual ~WeightSource() = default;

  [[nodiscard]] virtual bool contains(std::string_view name) const = 0;
  [[nodiscard]] virtual std::vector<std::string> names() const = 0;

  /// Checks from the headers alone whether `read` would find the tensor.
  /// @throws FormatError, naming file and tensor, if it is missing or has another shape or type
  virtual void check(std::string_view name, std::span<const std::size_t> shape) const = 0;

  /// Reads a tensor of exactly this shape, converted to float.
  /// @throws FormatError as check, or if it holds a value that is not finite
  [[nodiscard]] virtual std::vector<float> read(std::string_view name,
                                                std::span<const std::size_t> shape) = 0;
};

/// @throws FormatError, naming file, tensor and element, for a value that is not finite
void require_finite(std::span<const float> values, std::string_view file, std::string_view tensor);

class Checkpoint : public WeightSource {
 public:
  /// @throws FormatError if neither file exists, a shard is missing or damaged, or the index names
  /// a tensor that its shard does not hold
  explicit Checkpoint(const std::string& folder);

  [[nodiscard]] bool contains(std::string_view name) const override { return where_.contains(name); }
  [[nodiscard]] std::vector<std::string> names() const override;
  void check(std::string_view name, std::span<const std::size_t> shape) const override;
  [[nodiscard]] std::vector<float> read(std::string_view name,
                                        std::span<const std::size_t> shape) override;

 private:
  void open_shards(const std::string& folder, const std::string& index);

  std::string folder_;
  std::vector<SafetensorsFile> files_;
  std::map<std::string, std::size_t, std::less<>> where_;  // tensor name -> index in files_
};

}  // namespace kvpolicy::reference
