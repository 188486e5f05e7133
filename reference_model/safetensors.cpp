// SPDX-License-Identifier: Apache-2.0
#include <reference_model/safetensors.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <optional>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/io/json_text.hpp>
#include <kvpolicy/state/new_file.hpp>

namespace kvpolicy::reference {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors files are little endian");

constexpr std::size_t length_bytes = 8;

struct TypeName {
  TensorType type;
  std::string_view name;
  std::size_t bytes;
};

// The order is that of TensorType, which is the index.
constexpr std::array<TypeName, 16> types{{
    {TensorType::f64, "F64", 8},
    {TensorType::f32, "F32", 4},
    {TensorType::f16, "F16", 2},
    {TensorType::bf16, "BF16", 2},
    {TensorType::i64, "I64", 8},
    {TensorType::i32, "I32", 4},
    {TensorType::i16, "I16", 2},
    {TensorType::i8, "I8", 1},
    {TensorType::u64, "U64", 8},
    {TensorType::u32, "U32", 4},
    {TensorType::u16, "U16", 2},
    {TensorType::u8, "U8", 1},
    {TensorType::boolean, "BOOL", 1},
    {TensorType::f8_e4m3, "F8_E4M3", 1},
    {TensorType::f8_e5m2, "F8_E5M2", 1},
    {TensorType::c64, "C64", 8},
}};

std::string known_types() {
  std::string list;
  for (const TypeName& type : types) list += (list.empty() ? "" : ", ") + std::string(type.name);
  return list;
}

std::optional<std::size_t> checked_product(std::size_t a, std::size_t b) {
  if (b != 0 && a > std::numeric_limits<std::size_t>::max() / b) return std::nullopt;
  return a * b;
}

/// The bytes of a tensor of this shape; none if the count does not fit a size_t.
std::optional<std::size_t> expected_bytes(TensorType type, const std::vector<std::size_t>& shape) {
  std::optional<std::size_t> product = bytes_of(type);
  for (const std::size_t size : shape) {
    if (product) product = checked_product(*product, size);
  }
  // A zero makes the tensor empty, however large the other sizes are.
  if (std::ranges::count(shape, std::size_t{0}) > 0) return 0;
  return product;
}

/// Checks the word with the header's length in a file of `file_bytes`, and returns the length.
std::uint64_t header_length(std::span<const std::byte> word, std::uint64_t file_bytes,
                            std::string_view file) {
  require<FormatError>(file_bytes >= length_bytes, file, ": has ", file_bytes,
                       " bytes, but a safetensors file begins with an 8-byte header length");
  std::uint64_t length = 0;
  std::memcpy(&length, word.data(), length_bytes);
  require<FormatError>(length <= max_safetensors_header_bytes, file, ": header length ", length,
                       " is absurd, expected at most ", max_safetensors_header_bytes);
  require<FormatError>(length <= file_bytes - length_bytes, file, ": header length ", length,
                       " runs past the end of the file, which has ", file_bytes - length_bytes,
                       " bytes after the length: truncated?");
  return length;
}

std::uint64_t unsigned_number(const io::Json& value, std::string_view file, const std::string& name,
                              const char* what) {
  require<FormatError>(value.is_number_unsigned(), file, ": tensor ", name, ": ", what, " holds ",
                       io::in_quotes(value.dump()), ", expected whole numbers from 0");
  return value.get<std::uint64_t>();
}

TensorEntry parse_entry(const io::Json& json, std::uint64_t data_bytes, std::string_view file,
                        const std::string& name) {
  require<FormatError>(json.is_object() && json.size() == 3 && json.contains("dtype") &&
                           json.contains("shape") && json.contains("data_offsets"),
                       file, ": tensor ", name,
                       ": expected an object with exactly dtype, shape and data_offsets");
  const io::Json& dtype = json["dtype"];
  const auto type = std::ranges::find_if(types, [&](const TypeName& known) {
    return dtype.is_string() && dtype.get_ref<const std::string&>() == known.name;
  });
  require<FormatError>(type != types.end(), file, ": tensor ", name, ": dtype ", io::in_quotes(dtype.dump()),
                       " is not one of ", known_types());

  TensorEntry entry{.type = type->type, .shape = {}, .begin = 0, .end = 0};
  require<FormatError>(json["shape"].is_array(), file, ": tensor ", name, ": shape is not a list of sizes");
  for (const io::Json& size : json["shape"]) {
    entry.shape.push_back(static_cast<std::size_t>(unsigned_number(size, file, name, "shape")));
  }
  const io::Json& offsets = json["data_offsets"];
  require<FormatError>(offsets.is_array() && offsets.size() == 2, file, ": tensor ", name,
                       ": data_offsets is not a pair [begin, end]");
  entry.begin = unsigned_number(offsets[0], file, name, "data_offsets");
  entry.end = unsigned_number(offsets[1], file, name, "data_offsets");
  require<FormatError>(entry.begin <= entry.end, file, ": tensor ", name, ": data_offsets [", entry.begin,
                       ", ", entry.end, "] end before they begin");
  require<FormatError>(entry.end <= data_bytes, file, ": tensor ", name, ": data_offsets [", entry.begin,
                       ", ", entry.end, "] end past the ", data_bytes, " bytes of data: truncated?");
  const auto bytes = expected_bytes(entry.type, entry.shape);
  require<FormatError>(bytes.has_value(), file, ": tensor ", name, ": shape ",
                       io::in_quotes(text_of(entry.shape)), " has more elements than can be counted");
  require<FormatError>(*bytes == entry.end - entry.begin, file, ": tensor ", name, ": shape ",
                       io::in_quotes(text_of(entry.shape)), " of ", type->name, " needs ", *bytes,
                       " bytes, data_offsets [", entry.begin, ", ", entry.end, "] span ",
                       entry.end - entry.begin);
  return entry;
}

/// Checks that the ranges cover the data: every byte belongs to exactly one tensor.
void check_cover(const SafetensorsHeader& header, std::uint64_t data_bytes, std::string_view file) {
  using Item = std::pair<const std::string, TensorEntry>;
  std::vector<const Item*> order;
  order.reserve(header.tensors.size());
  for (const Item& item : header.tensors) order.push_back(&item);
  std::ranges::sort(order, {},
                    [](const Item* item) { return std::pair{item->second.begin, item->second.end}; });
  std::uint64_t covered = 0;
  for (const Item* item : order) {
    require<FormatError>(item->second.begin >= covered, file, ": tensor ", io::in_quotes(item->first),
                         ": begins at byte ", item->second.begin,
                         " inside the tensor before it, which ends at ", covered);
    require<FormatError>(item->second.begin == covered, file, ": tensor ", io::in_quotes(item->first),
                         ": begins at byte ", item->second.begin, ", expected ", covered,
                         ": bytes between tensors belong to none");
    covered = item->second.end;
  }
  require<FormatError>(covered == data_bytes, file, ": tensors cover ", covered, " of ", data_bytes,
                       " bytes of data; the rest belongs to none");
}

SafetensorsHeader parse_header(std::string_view text, std::uint64_t data_bytes, std::string_view file) {
  // The format requires the brace, so that no other encoding or padding can precede the header.
  require<FormatError>(text.starts_with('{'), file, ": header does not begin with '{'");
  const io::Json json = io::parse_json(text, file, {.deepest = 4});
  SafetensorsHeader header;
  for (const auto& [name, value] : json.items()) {
    if (name != "__metadata__") {
      header.tensors.emplace(name, parse_entry(value, data_bytes, file, io::in_quotes(name)));
      continue;
    }
    require<FormatError>(value.is_object(), file, ": __metadata__ is not an object");
    for (const auto& [key, text_value] : value.items()) {
      require<FormatError>(text_value.is_string(), file, ": __metadata__ ", io::in_quotes(key),
                           " is not a text");
      header.metadata.emplace(key, text_value.get<std::string>());
    }
  }
  header.data_begin = length_bytes + text.size();
  check_cover(header, data_bytes, file);
  return header;
}

}  // namespace

std::size_t bytes_of(TensorType type) noexcept { return types[static_cast<std::size_t>(type)].bytes; }

std::string_view name_of(TensorType type) noexcept { return types[static_cast<std::size_t>(type)].name; }

std::string text_of(std::span<const std::size_t> shape) {
  std::string text = "[";
  for (const std::size_t size : shape) {
    text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  }
  return text + "]";
}

SafetensorsHeader parse_safetensors(std::span<const std::byte> bytes, std::string_view file) {
  const std::uint64_t length = header_length(bytes, bytes.size(), file);
  const auto header = bytes.subspan(length_bytes, static_cast<std::size_t>(length));
  return parse_header({reinterpret_cast<const char*>(header.data()), header.size()},
                      bytes.size() - length_bytes - length, file);
}

[[noreturn]] static void refuse_type(TensorType type) {
  fail<FormatError>("elements of type ", name_of(type), " cannot be read: expected F32, F16 or BF16");
}

std::vector<float> to_floats(TensorType type, std::span<const std::byte> bytes) {
  const std::size_t size = bytes_of(type);
  std::vector<float> values(bytes.size() / size);
  const auto short_values = [&]<class Short>() {
    for (std::size_t i = 0; i < values.size(); ++i) {
      Short value;
      std::memcpy(&value.bits, bytes.data() + i * size, sizeof(value.bits));
      values[i] = static_cast<float>(value);
    }
  };
  switch (type) {
    case TensorType::f32:
      if (!values.empty()) std::memcpy(values.data(), bytes.data(), values.size() * size);
      break;
    case TensorType::f16: short_values.template operator()<float16>(); break;
    case TensorType::bf16: short_values.template operator()<bfloat16>(); break;
    default: refuse_type(type);
  }
  return values;
}

namespace {

/// Whether any of `count` numbers has all bits of `exponent`, in one pass that compilers turn into vectors.
template <class Word>
bool any_not_finite(const std::byte* bytes, std::size_t count, Word exponent) {
  unsigned found = 0;
  for (std::size_t i = 0; i < count; ++i) {
    Word word;
    std::memcpy(&word, bytes + i * sizeof(Word), sizeof(Word));
    found |= static_cast<unsigned>((word & exponent) == exponent);
  }
  return found != 0;
}

template <class Word>
std::optional<std::size_t> find_not_finite(std::span<const std::byte> bytes, Word exponent) {
  constexpr std::size_t block = 4096;
  const std::size_t count = bytes.size() / sizeof(Word);
  for (std::size_t first = 0; first < count; first += block) {
    const std::size_t end = std::min(count, first + block);
    if (!any_not_finite(bytes.data() + first * sizeof(Word), end - first, exponent)) continue;
    for (std::size_t i = first; i < end; ++i) {
      if (any_not_finite(bytes.data() + i * sizeof(Word), 1, exponent)) return i;
    }
  }
  return std::nullopt;
}

}  // namespace

std::optional<std::size_t> first_not_finite(TensorType type, std::span<const std::byte> bytes) {
  switch (type) {
    case TensorType::f32: return find_not_finite<std::uint32_t>(bytes, 0x7f800000U);
    case TensorType::f16: return find_not_finite<std::uint16_t>(bytes, 0x7c00U);
    case TensorType::bf16: return find_not_finite<std::uint16_t>(bytes, 0x7f80U);
    default: refuse_type(type);
  }
}

SafetensorsFile::SafetensorsFile(std::string path)
    : path_{std::move(path)}, file_{std::make_shared<const MappedFile>(path_)} {
  const std::size_t word = std::min<std::uint64_t>(length_bytes, file_->size());
  const std::uint64_t length = header_length(file_->bytes(0, word), file_->size(), path_);
  const auto header = file_->bytes(length_bytes, static_cast<std::size_t>(length));
  header_ = parse_header({reinterpret_cast<const char*>(header.data()), header.size()},
                         file_->size() - length_bytes - length, path_);
}

const TensorEntry& SafetensorsFile::entry(std::string_view name) const {
  const auto found = header_.tensors.find(name);
  require<FormatError>(found != header_.tensors.end(), path_, ": has no tensor ", io::in_quotes(name));
  return found->second;
}

std::span<const std::byte> SafetensorsFile::bytes(std::string_view name) const {
  const TensorEntry& tensor = entry(name);
  return file_->bytes(header_.data_begin + tensor.begin, static_cast<std::size_t>(tensor.end - tensor.begin));
}

std::vector<std::byte> SafetensorsFile::read_bytes(std::string_view name) const {
  const auto all = bytes(name);
  return {all.begin(), all.end()};
}

void SafetensorsFile::require_floats(std::string_view name) const {
  const TensorType type = entry(name).type;
  require<FormatError>(type == TensorType::f32 || type == TensorType::f16 || type == TensorType::bf16, path_,
                       ": tensor ", io::in_quotes(name), ": dtype is ", name_of(type),
                       ", expected F32, F16 or BF16");
}

std::vector<float> SafetensorsFile::read_floats(std::string_view name) const {
  require_floats(name);
  return to_floats(entry(name).type, bytes(name));
}

std::vector<std::byte> serialize_safetensors(std::span<const TensorToWrite> tensors,
                                             const std::map<std::string, std::string>& metadata) {
  io::Json header = io::Json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  std::uint64_t end = 0;
  for (const TensorToWrite& tensor : tensors) {
    const auto expected = expected_bytes(tensor.type, tensor.shape);
    require<FormatError>(expected == tensor.bytes.size(), "tensor ", io::in_quotes(tensor.name), ": shape ",
                         text_of(tensor.shape), " of ", name_of(tensor.type), " does not fit ",
                         tensor.bytes.size(), " bytes");
    require<FormatError>(!header.contains(tensor.name) && tensor.name != "__metadata__", "tensor name ",
                         io::in_quotes(tensor.name), " is taken");
    header[tensor.name] = {{"dtype", name_of(tensor.type)},
                           {"shape", tensor.shape},
                           {"data_offsets", {end, end + tensor.bytes.size()}}};
    end += tensor.bytes.size();
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const io::Json::type_error&) {
    throw FormatError("names of tensors and metadata of a safetensors file must be UTF-8");
  }
  text.resize((text.size() + 7) / 8 * 8, ' ');  // readers that map the file need aligned tensors

  const std::uint64_t length = text.size();
  std::vector<std::byte> bytes(length_bytes + text.size());
  std::memcpy(bytes.data(), &length, length_bytes);
  std::memcpy(bytes.data() + length_bytes, text.data(), text.size());
  bytes.reserve(bytes.size() + static_cast<std::size_t>(end));
  for (const TensorToWrite& tensor : tensors) {
    bytes.insert(bytes.end(), tensor.bytes.begin(), tensor.bytes.end());
  }
  return bytes;
}

void write_safetensors(const std::string& path, std::span<const TensorToWrite> tensors,
                       const std::map<std::string, std::string>& metadata) {
  const std::vector<std::byte> bytes = serialize_safetensors(tensors, metadata);
  NewFile file{path};
  file.write(bytes);
  file.replace();
}

}  // namespace kvpolicy::reference
