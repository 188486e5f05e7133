// SPDX-License-Identifier: Apache-2.0
#include <reference_model/checkpoint.hpp>

#include <algorithm>
#include <array>
#include <filesystem>
#include <system_error>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/io/json_text.hpp>
#include <kvpolicy/io/text_file.hpp>

namespace kvpolicy::reference {
namespace {

constexpr std::size_t max_index_bytes = 100'000'000;

/// A shard must be in the folder of its index; a name with a path in it could reach any file of the
/// machine.
bool is_plain_file_name(const std::string& name) {
  return !name.empty() && name != "." && name != ".." &&
         name.find_first_of(std::string_view("/\\:\0", 4)) == std::string::npos;
}

}  // namespace

Checkpoint::Checkpoint(const std::string& folder) : folder_{folder} {
  const std::string single = folder + "/model.safetensors";
  const std::string index = folder + "/model.safetensors.index.json";
  std::error_code ignored;  // on any error the file counts as missing
  require<FormatError>(std::filesystem::is_directory(folder, ignored), folder,
                       ": not a folder; expected one with config.json and model.safetensors");
  if (std::filesystem::exists(single, ignored)) {
    files_.emplace_back(single);
    for (const auto& [name, entry] : files_.front().header().tensors) where_.emplace(name, 0);
    return;
  }
  require<FormatError>(std::filesystem::exists(index, ignored), folder,
                       ": has neither model.safetensors nor model.safetensors.index.json");
  open_shards(folder, index);
}

void Checkpoint::open_shards(const std::string& folder, const std::string& index) {
  const io::Json json = io::parse_json(io::read_text_file(index, max_index_bytes), index);
  require<FormatError>(json.is_object() && json.contains("weight_map") && json["weight_map"].is_object(),
                       index, ": expected an object with weight_map, tensor names to file names");
  std::map<std::string, std::size_t> opened;
  for (const auto& [name, file] : json["weight_map"].items()) {
    require<FormatError>(file.is_string() && is_plain_file_name(file.get<std::string>()), index, ": tensor ",
                         io::in_quotes(name), ": ", io::in_quotes(file.dump()),
                         " is not the name of a file in this folder");
    const auto [shard, is_new] = opened.try_emplace(file.get<std::string>(), files_.size());
    if (is_new) files_.emplace_back(folder + "/" + shard->first);
    require<FormatError>(files_[shard->second].contains(name), index, ": says that tensor ",
                         io::in_quotes(name), " is in ", io::in_quotes(shard->first),
                         ", which does not hold it");
    where_.emplace(name, shard->second);
  }
}

std::vector<std::string> Checkpoint::names() const {
  std::vector<std::string> names;
  for (const auto& [name, file] : where_) names.push_back(name);
  return names;
}

const SafetensorsFile& Checkpoint::file_of(std::string_view name) const {
  const auto found = where_.find(name);
  require<FormatError>(found != where_.end(), folder_, ": has no tensor ", io::in_quotes(name));
  return files_[found->second];
}

void Checkpoint::check(std::string_view name, std::span<const std::size_t> shape) const {
  require<FormatError>(contains(name), folder_, ": has no tensor ", io::in_quotes(name), " of shape ",
                       text_of(shape));
  const SafetensorsFile& file = file_of(name);
  const TensorEntry& entry = file.entry(name);
  require<FormatError>(std::ranges::equal(entry.shape, shape), file.path(), ": tensor ", io::in_quotes(name),
                       ": shape is ", io::in_quotes(text_of(entry.shape)), ", config.json needs ",
                       text_of(shape));
  file.require_floats(name);
}

std::span<const std::byte> Checkpoint::finite_bytes(std::string_view name,
                                                    std::span<const std::size_t> shape) const {
  check(name, shape);
  const SafetensorsFile& file = file_of(name);
  const TensorType type = file.entry(name).type;
  const auto bytes = file.bytes(name);
  if (const auto odd = first_not_finite(type, bytes)) {
    const std::size_t size = bytes_of(type);
    fail<FormatError>(file.path(), ": tensor ", io::in_quotes(name), ": element ", *odd, " is ",
                      to_floats(type, bytes.subspan(*odd * size, size)).front(), ", expected finite values");
  }
  return bytes;
}

std::vector<float> Checkpoint::read(std::string_view name, std::span<const std::size_t> shape) const {
  const auto bytes = finite_bytes(name, shape);
  return to_floats(file_of(name).entry(name).type, bytes);
}

WeightFormat Checkpoint::format(std::string_view name) const {
  const SafetensorsFile& file = file_of(name);
  file.require_floats(name);
  switch (file.entry(name).type) {
    case TensorType::f16: return WeightFormat::float16;
    case TensorType::bf16: return WeightFormat::bfloat16;
    default: return WeightFormat::float32;
  }
}

WeightMatrix Checkpoint::matrix(std::string_view name, std::size_t rows, std::size_t columns,
                                std::optional<WeightFormat> wanted) const {
  const auto bytes = finite_bytes(name, std::array{rows, columns});
  const SafetensorsFile& file = file_of(name);
  const WeightMatrix stored{rows, columns, format(name), bytes, file.mapping()};
  if (!wanted || *wanted == stored.format()) return stored;
  WeightMatrix converted = stored.as(*wanted);
  // A converted matrix has memory of its own, so the file's is not needed any more.
  file.mapping()->release(file.bytes(name));
  return converted;
}

}  // namespace kvpolicy::reference
