// SPDX-License-Identifier: Apache-2.0
//
// Where the weights of a model come from: a folder of safetensors (checkpoint.hpp) or a GGUF file
// (gguf_model.hpp).
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

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

  /// A matrix in the format `wanted`. Without one its memory is the file's mapping where the file
  /// stores it as it is used; the mapping lives as long as the matrix.
  /// @throws FormatError as read
  [[nodiscard]] virtual WeightMatrix matrix(std::string_view name, std::size_t rows, std::size_t columns,
                                            std::optional<WeightFormat> wanted) const = 0;
};

}  // namespace kvpolicy::reference
