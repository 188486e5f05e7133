// SPDX-License-Identifier: Apache-2.0
#include <reference_model/gguf.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <type_traits>
#include <utility>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/io/json_text.hpp>

namespace kvpolicy::reference {
namespace {

static_assert(std::endian::native == std::endian::little, "GGUF files are little endian");

constexpr std::string_view alignment_key = "general.alignment";
constexpr std::size_t most_dimensions = 4;
constexpr std::uint64_t largest_alignment = std::uint64_t{1} << 30;

/// The types of metadata by their numbers in a file.
enum class ValueType : std::uint32_t {
  uint8,
  int8,
  uint16,
  int16,
  uint32,
  int32,
  float32,
  boolean,
  text,
  array,
  uint64,
  int64,
  float64
};

constexpr std::array<std::string_view, 13> value_type_names{"UINT8",  "INT8",    "UINT16", "INT16",  "UINT32",
                                                            "INT32",  "FLOAT32", "BOOL",   "STRING", "ARRAY",
                                                            "UINT64", "INT64",   "FLOAT64"};

/// Takes values from the front of a header. Every refusal says where in the file it stands.
class Cursor {
 public:
  Cursor(std::span<const std::byte> bytes, std::string_view file) : bytes_{bytes}, file_{file} {}

  [[nodiscard]] std::size_t at() const noexcept { return at_; }
  [[nodiscard]] std::size_t left() const noexcept { return bytes_.size() - at_; }

  template <class... Parts>
  void check(bool fine, const Parts&... parts) const {
    require<FormatError>(fine, file_, ": at byte ", at_, ": ", parts...);
  }

  std::span<const std::byte> take(std::uint64_t count, std::string_view what) {
    check(count <= left(), what, " needs ", count, " bytes, the header has ", left(), " more: truncated?");
    at_ += static_cast<std::size_t>(count);
    return bytes_.subspan(at_ - static_cast<std::size_t>(count), static_cast<std::size_t>(count));
  }

  template <class Number>
  Number number(std::string_view what) {
    Number value;
    std::memcpy(&value, take(sizeof(value), what).data(), sizeof(value));
    return value;
  }

  std::string text(std::string_view what) {
    const auto size = number<std::uint64_t>(what);
    const auto bytes = take(size, what);
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }

  bool boolean(std::string_view what) {
    const auto byte = number<std::uint8_t>(what);
    check(byte <= 1, what, " is ", static_cast<int>(byte), ", expected 0 or 1 for a BOOL");
    return byte == 1;
  }

  /// A count of things that take at least `least_bytes` each, so that a lying count cannot make a
  /// reader allocate more than the file justifies.
  std::size_t count(std::uint64_t least_bytes, std::string_view what) {
    const auto value = number<std::uint64_t>(what);
    check(value <= left() / least_bytes, what, " is ", value, ", but only ", left(),
          " bytes follow: truncated?");
    return static_cast<std::size_t>(value);
  }

  ValueType value_type(std::string_view what) {
    const auto type = number<std::uint32_t>(what);
    check(type < value_type_names.size(), what, " has value type ", type, ", expected 0 to ",
          value_type_names.size() - 1);
    return static_cast<ValueType>(type);
  }

 private:
  std::span<const std::byte> bytes_;
  std::string_view file_;
  std::size_t at_ = 0;
};

/// Calls `use` with a function that reads one value of the type from a cursor, widened.
template <class Use>
auto with_reader(ValueType type, const Use& use) {
  const auto widened = [&]<class Stored, class Wide>(Stored, Wide) {
    return use(
        [](Cursor& cursor, std::string_view what) { return static_cast<Wide>(cursor.number<Stored>(what)); });
  };
  switch (type) {
    case ValueType::uint8: return widened(std::uint8_t{}, std::uint64_t{});
    case ValueType::uint16: return widened(std::uint16_t{}, std::uint64_t{});
    case ValueType::uint32: return widened(std::uint32_t{}, std::uint64_t{});
    case ValueType::uint64: return widened(std::uint64_t{}, std::uint64_t{});
    case ValueType::int8: return widened(std::int8_t{}, std::int64_t{});
    case ValueType::int16: return widened(std::int16_t{}, std::int64_t{});
    case ValueType::int32: return widened(std::int32_t{}, std::int64_t{});
    case ValueType::int64: return widened(std::int64_t{}, std::int64_t{});
    case ValueType::float32: return widened(float{}, double{});
    case ValueType::float64: return widened(double{}, double{});
    case ValueType::boolean:
      return use([](Cursor& cursor, std::string_view what) { return cursor.boolean(what); });
    case ValueType::text:
    case ValueType::array: break;
  }
  return use([](Cursor& cursor, std::string_view what) { return cursor.text(what); });
}

std::uint64_t least_bytes(ValueType type) {
  switch (type) {
    case ValueType::uint8:
    case ValueType::int8:
    case ValueType::boolean: return 1;
    case ValueType::uint16:
    case ValueType::int16: return 2;
    case ValueType::uint32:
    case ValueType::int32:
    case ValueType::float32: return 4;
    default: return 8;  // of a text, its length
  }
}

GgufValue read_value(Cursor& cursor, std::string_view what) {
  const ValueType type = cursor.value_type(what);
  if (type != ValueType::array) {
    return with_reader(type, [&](const auto& read) { return GgufValue{read(cursor, what)}; });
  }
  const ValueType element = cursor.value_type(what);
  cursor.check(element != ValueType::array, what, " is an array of arrays, expected one of plain values");
  const std::size_t count = cursor.count(least_bytes(element), what);
  return with_reader(element, [&](const auto& read) {
    std::vector<decltype(read(cursor, what))> values;
    values.reserve(count);
    for (std::size_t i = 0; i < count; ++i) values.push_back(read(cursor, what));
    return GgufValue{GgufArray{std::move(values)}};
  });
}

/// Reads the entry of a tensor, whose `begin` is still the offset from the end of the header.
GgufTensor read_tensor(Cursor& cursor, const std::string& what) {
  const auto dimensions = cursor.number<std::uint32_t>(what);
  cursor.check(dimensions >= 1 && dimensions <= most_dimensions, what, " has ", dimensions,
               " dimensions, expected 1 to ", most_dimensions);
  GgufTensor tensor;
  std::uint64_t elements = 1;
  for (std::uint32_t i = 0; i < dimensions; ++i) {
    const auto size = cursor.number<std::uint64_t>(what);
    // The product is kept below 2^60, so that no count of bytes can overflow.
    cursor.check(size > 0 && size <= (std::uint64_t{1} << 60) / elements, what, ": size ", size,
                 " of dimension ", i, ", expected at least 1 and a product that can be counted");
    elements *= size;
    tensor.shape.insert(tensor.shape.begin(), static_cast<std::size_t>(size));
  }
  const auto number = cursor.number<std::uint32_t>(what);
  const GgufBlock* block = find_gguf_block(number);
  cursor.check(block != nullptr, what, " has type ", number, " (", gguf_type_name(number),
               "), expected one of ", known_gguf_types());
  tensor.type = block->type;
  cursor.check(tensor.columns() % block->elements == 0, what, ": rows of ", tensor.columns(),
               " numbers are not whole blocks of ", block->name, ", which have ", block->elements);
  // A block has at most 4 bytes for each element.
  tensor.bytes = static_cast<std::size_t>(elements / block->elements * block->bytes);
  tensor.begin = cursor.number<std::uint64_t>(what);
  return tensor;
}

std::uint64_t alignment_of(const GgufHeader& header, std::string_view file) {
  const auto found = header.metadata.find(alignment_key);
  if (found == header.metadata.end()) return 32;
  const auto* value = std::get_if<std::uint64_t>(&found->second);
  require<FormatError>(value != nullptr && std::has_single_bit(*value) && *value <= largest_alignment, file,
                       ": ", alignment_key, " is ", shown(found->second), ", expected a power of two up to ",
                       largest_alignment);
  return *value;
}

/// Turns offsets into positions in the file and checks that every tensor lies in it.
void locate_tensors(GgufHeader& header, std::uint64_t header_end, std::uint64_t file_bytes,
                    std::string_view file) {
  const std::uint64_t alignment = alignment_of(header, file);
  // The header has less than 2^30 bytes, so this cannot overflow.
  const std::uint64_t data = (header_end + alignment - 1) / alignment * alignment;
  std::vector<std::pair<std::uint64_t, std::string_view>> order;
  for (auto& [name, tensor] : header.tensors) {
    const std::uint64_t offset = tensor.begin;
    require<FormatError>(offset % alignment == 0, file, ": tensor ", io::in_quotes(name), ": offset ", offset,
                         " is not a multiple of the alignment ", alignment);
    require<FormatError>(
        data <= file_bytes && offset <= file_bytes - data && tensor.bytes <= file_bytes - data - offset, file,
        ": tensor ", io::in_quotes(name), ": ", tensor.bytes, " bytes at offset ", offset,
        " end past the file, which has ", data <= file_bytes ? file_bytes - data : 0,
        " bytes of data: truncated?");
    tensor.begin = data + offset;
    order.emplace_back(tensor.begin, name);
  }
  std::ranges::sort(order);
  for (std::size_t i = 1; i < order.size(); ++i) {
    const GgufTensor& before = header.tensors.find(order[i - 1].second)->second;
    require<FormatError>(order[i].first >= before.begin + before.bytes, file, ": tensor ",
                         io::in_quotes(order[i].second), " begins at byte ", order[i].first,
                         " inside tensor ", io::in_quotes(order[i - 1].second), ", which ends at ",
                         before.begin + before.bytes);
  }
}

}  // namespace

GgufHeader parse_gguf(std::span<const std::byte> bytes, std::string_view file) {
  Cursor cursor{bytes.first(std::min(bytes.size(), max_gguf_header_bytes)), file};
  constexpr std::string_view magic = "GGUF";
  require<FormatError>(
      bytes.size() >= magic.size() && std::memcmp(bytes.data(), magic.data(), magic.size()) == 0, file,
      ": is not a GGUF file: it does not begin with 'GGUF'");
  cursor.take(magic.size(), "the magic number");
  GgufHeader header;
  header.version = cursor.number<std::uint32_t>("the version");
  cursor.check(header.version == 2 || header.version == 3, "version ", header.version,
               ", expected 2 or 3, little endian");
  // A tensor's entry has a name's length, a count of dimensions, one size, a type and an offset; a
  // metadata entry has a key's length, a type and a value. Any of both needs more bytes than
  // stated.
  const std::size_t tensors = cursor.count(32, "the count of tensors");
  const std::size_t keys = cursor.count(13, "the count of metadata keys");
  for (std::size_t i = 0; i < keys; ++i) {
    std::string key = cursor.text("a metadata key");
    const std::string what = "metadata key " + io::in_quotes(key);
    GgufValue value = read_value(cursor, what);
    const bool is_new = header.metadata.emplace(std::move(key), std::move(value)).second;
    cursor.check(is_new, what, " is given twice");
  }
  for (std::size_t i = 0; i < tensors; ++i) {
    std::string name = cursor.text("a tensor's name");
    const std::string what = "tensor " + io::in_quotes(name);
    GgufTensor tensor = read_tensor(cursor, what);
    const bool is_new = header.tensors.emplace(std::move(name), std::move(tensor)).second;
    cursor.check(is_new, what, " is given twice");
  }
  locate_tensors(header, cursor.at(), bytes.size(), file);
  return header;
}

bool is_gguf(const std::string& path) {
  std::error_code ignored;  // on any error the path counts as a folder, and is refused as one
  return std::filesystem::is_regular_file(path, ignored);
}

GgufFile::GgufFile(const std::string& path)
    : file_{path}, header_{parse_gguf(file_.bytes(0, static_cast<std::size_t>(file_.size())), path)} {}

// ---- metadata by key -------------------------------------------------------------------------

namespace {

constexpr std::size_t largest_setting = std::size_t{1} << 24;  // as in a config.json

/// The value as a whole number from 0 to `most`; none for another type or value.
std::optional<std::uint64_t> whole(const GgufValue& value, std::uint64_t most) {
  std::optional<std::uint64_t> result;
  if (const auto* a = std::get_if<std::uint64_t>(&value)) result = *a;
  if (const auto* a = std::get_if<std::int64_t>(&value); a && *a >= 0) {
    result = static_cast<std::uint64_t>(*a);
  }
  return result && *result <= most ? result : std::nullopt;
}

template <class T>
std::optional<T> only(const GgufValue& value) {
  const T* result = std::get_if<T>(&value);
  return result ? std::optional{*result} : std::nullopt;
}

template <class List>
std::optional<List> only_list(const GgufValue& value) {
  const auto* array = std::get_if<GgufArray>(&value);
  const List* result = array ? std::get_if<List>(array) : nullptr;
  return result ? std::optional{*result} : std::nullopt;
}

}  // namespace

std::string shown(const GgufValue& value) {
  return std::visit(
      []<class Value>(const Value& own) -> std::string {
        if constexpr (std::is_same_v<Value, std::string>) {
          return io::in_quotes(own);
        } else if constexpr (std::is_same_v<Value, GgufArray>) {
          constexpr std::array<std::string_view, 5> types{"UINT", "INT", "FLOAT", "BOOL", "STRING"};
          const std::size_t size = std::visit([](const auto& list) { return list.size(); }, own);
          return message("an array of ", size, " ", types[own.index()]);
        } else {
          return io::Json(own).dump();
        }
      },
      value);
}

template <class T, class Convert>
T GgufKeys::get(std::string_view key, std::optional<T> fallback, std::string_view expected,
                const Convert& convert) const {
  const auto found = header_->metadata.find(key);
  if (found == header_->metadata.end() && fallback) return *std::move(fallback);
  require<FormatError>(found != header_->metadata.end(), origin_, ": metadata ", key, " is missing");
  std::optional<T> value = convert(found->second);
  require<FormatError>(value.has_value(), origin_, ": metadata ", key, " is ", shown(found->second),
                       ", expected ", expected);
  return *std::move(value);
}

std::size_t GgufKeys::size(std::string_view key, std::optional<std::size_t> fallback) const {
  const std::string expected = message("a whole number from 0 to ", largest_setting);
  return get(key, fallback, expected, [](const GgufValue& value) {
    const auto number = whole(value, largest_setting);
    return number ? std::optional{static_cast<std::size_t>(*number)} : std::nullopt;
  });
}

double GgufKeys::number(std::string_view key, std::optional<double> fallback) const {
  return get(key, fallback, "a number", [](const GgufValue& value) -> std::optional<double> {
    if (const auto* number = std::get_if<double>(&value)) return *number;
    const auto number = whole(value, largest_setting);
    return number ? std::optional{static_cast<double>(*number)} : std::nullopt;
  });
}

bool GgufKeys::flag(std::string_view key, std::optional<bool> fallback) const {
  return get(key, fallback, "a BOOL", only<bool>);
}

std::string GgufKeys::text(std::string_view key, std::optional<std::string> fallback) const {
  return get(key, std::move(fallback), "a STRING", only<std::string>);
}

std::vector<std::string> GgufKeys::texts(std::string_view key) const {
  using List = std::vector<std::string>;
  return get(key, std::optional{List{}}, "an array of STRING", only_list<List>);
}

std::vector<double> GgufKeys::numbers(std::string_view key) const {
  using List = std::vector<double>;
  return get(key, std::optional{List{}}, "an array of floats", only_list<List>);
}

std::vector<std::int64_t> GgufKeys::whole_numbers(std::string_view key) const {
  using List = std::vector<std::int64_t>;
  return get(key, std::optional{List{}}, "an array of whole numbers",
             [](const GgufValue& value) -> std::optional<List> {
               const auto list = only_list<std::vector<std::uint64_t>>(value);
               if (!list) return only_list<List>(value);
               // Numbers of 64 bits that are no std::int64_t become negative, which no reader
               // takes.
               return List(list->begin(), list->end());
             });
}

}  // namespace kvpolicy::reference
