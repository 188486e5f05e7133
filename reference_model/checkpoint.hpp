// SPDX-License-Identifier: Apache-2.0
//
// The weights of a Hugging Face folder: one model.safetensors, or shards that
// model.safetensors.index.json names.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <reference_model/safetensors.hpp>
#include <reference_model/weight_source.hpp>

namespace kvpolicy::reference {

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
