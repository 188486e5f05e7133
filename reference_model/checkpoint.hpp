// SPDX-License-Identifier: Apache-2.0
//
// Where weights come from, and the usual case: a Hugging Face folder with one model.safetensors, or
// with shards named by model.safetensors.index.json.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <reference_model/safetensors.hpp>
#include <reference_model/weight_matrix.hpp>

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
                                                std::span<const std::size_t> shape) const = 0;

  /// The format of `matrix` where none is asked for: the stored one if matrix products take it.
  /// @throws FormatError if there is no such tensor of floating-point numbers
  [[nodiscard]] virtual WeightFormat format(std::string_view name) const = 0;

  /// A matrix in the format `wanted`. Without one its memory is the file's mapping where the file stores it
  /// as it is used; the mapping lives as long as the matrix.
  /// @throws FormatError as read
  [[nodiscard]] virtual WeightMatrix matrix(std::string_view name, std::size_t rows,
                                            std::size_t columns,
                                            std::optional<WeightFormat> wanted) const = 0;
};

class Checkpoint : public WeightSource {
 public:
  /// @throws FormatError if neither file exists, a shard is missing or damaged, or the index names
  /// a tensor that its shard does not hold
  explicit Checkpoint(const std::string& folder);

  [[nodiscard]] bool contains(std::string_view name) const override { return where_.contains(name); }
  [[nodiscard]] std::vector<std::string> names() const override;
  void check(std::string_view name, std::span<const std::size_t> shape) const override;
  [[nodiscard]] std::vector<float> read(std::string_view name,
                                        std::span<const std::size_t> shape) const override;
  [[nodiscard]] WeightFormat format(std::string_view name) const override;
  [[nodiscard]] WeightMatrix matrix(std::string_view name, std::size_t rows, std::size_t columns,
                                    std::optional<WeightFormat> wanted) const override;

 private:
  /// The checked bytes of a tensor, all finite.
  [[nodiscard]] std::span<const std::byte> finite_bytes(std::string_view name,
                                                        std::span<const std::size_t> shape) const;
  [[nodiscard]] const SafetensorsFile& file_of(std::string_view name) const;
  void open_shards(const std::string& folder, const std::string& index);

  std::string folder_;
  std::vector<SafetensorsFile> files_;
  std::map<std::string, std::size_t, std::less<>> where_;  // tensor name -> index in files_
};

}  // namespace kvpolicy::reference
