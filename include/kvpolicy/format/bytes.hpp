// SPDX-License-Identifier: Apache-2.0
//
// Numbers of bytes as people read them: `fmt::print("{}", Bytes{cache.bytes()})` prints "17.31 MB".
//
//     {}         a suitable unit, powers of 1000: 999 B, 1.02 kB, 17.31 MB, 128.8 GB
//     {:iB}      the same in powers of 1024: 1.00 KiB
//     {:MB}      always this unit, two decimals: 1,234.56 MB
//     {:.1GiB}   this unit, one decimal
//     {:*<12}    fill, alignment (< ^ >; the default is > as for numbers) and width come first
//
// Units are B, kB to EB and KiB to EiB. A wrong format is a compile-time error in fmt's checked format
// strings, and a fmt::format_error in run-time ones.
#pragma once

#include <algorithm>
#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include <kvpolicy/core/error.hpp>

namespace kvpolicy {

/// A number of bytes that knows how to print itself (format/bytes.hpp lists the formats).
struct Bytes {
  std::uint64_t count = 0;
  friend constexpr auto operator<=>(const Bytes&, const Bytes&) = default;
};

namespace detail {

struct ByteUnit {
  std::string_view name;
  double size;
};
inline constexpr std::array<ByteUnit, 7> decimal_units{
    {{"B", 1.0}, {"kB", 1e3}, {"MB", 1e6}, {"GB", 1e9}, {"TB", 1e12}, {"PB", 1e15}, {"EB", 1e18}}};
inline constexpr std::array<ByteUnit, 7> binary_units{{{"B", 1.0},
                                                       {"KiB", 0x1p10},
                                                       {"MiB", 0x1p20},
                                                       {"GiB", 0x1p30},
                                                       {"TiB", 0x1p40},
                                                       {"PiB", 0x1p50},
                                                       {"EiB", 0x1p60}}};

/// Inserts commas into the digits before the decimal point.
[[nodiscard]] inline std::string with_commas(std::string digits) {
  for (std::size_t at = std::min(digits.find('.'), digits.size()); at > 3;) {
    at -= 3;
    digits.insert(at, 1, ',');
  }
  return digits;
}
[[nodiscard]] inline std::string with_commas(std::uint64_t number) {
  return with_commas(fmt::format("{}", number));
}

/// The format in which a number of bytes is written.
struct ByteFormat {
  static constexpr int automatic = -1;
  bool binary = false;
  int unit = automatic;    ///< index of the unit
  int digits = automatic;  ///< after the decimal point

  [[nodiscard]] std::string text(std::uint64_t count) const {
    const auto& units = binary ? binary_units : decimal_units;
    const double base = binary ? 1024.0 : 1000.0;
    const auto number = static_cast<double>(count);
    // The rounded digits decide whether the next unit is used: what rounds to 1000 kB is written as 1 MB.
    std::size_t chosen = unit == automatic ? 0 : static_cast<std::size_t>(unit);
    std::string shown = digits_of(count, number, units[chosen]);
    while (unit == automatic && chosen + 1 < units.size() && whole_part(shown) >= base) {
      ++chosen;
      shown = digits_of(count, number, units[chosen]);
    }
    return fmt::format("{} {}", with_commas(std::move(shown)), units[chosen].name);
  }

 private:
  [[nodiscard]] std::string digits_of(std::uint64_t count, double number, const ByteUnit& in) const {
    if (in.size == 1.0) return fmt::format("{}", count);
    std::string shown = fmt::format("{:.{}f}", number / in.size, digits == automatic ? 2 : digits);
    if (unit == automatic && digits == automatic && whole_part(shown) >= 100.0) {
      shown = fmt::format("{:.1f}", number / in.size);
    }
    return shown;
  }
  [[nodiscard]] static double whole_part(std::string_view shown) {
    double number = 0.0;
    for (const char digit : shown.substr(0, shown.find('.'))) {
      number = 10.0 * number + static_cast<double>(digit - '0');
    }
    return number;
  }
};

/// Reads "[[fill]align][width][.digits][unit]" up to the closing brace.
class BytesSpec {
 public:
  constexpr const char* parse(const char* at, const char* end) {
    at = parse_align(at, end);
    if (at != end && *at >= '1' && *at <= '9') at = parse_number(at, end, width_, most_width);
    if (at != end && *at == '.') {
      std::size_t digits = 0;
      const char* const first = at + 1;
      at = parse_number(first, end, digits, most_digits);
      if (at == first) format_is_wrong("Bytes: a point must be followed by the number of decimals");
      format_.digits = static_cast<int>(digits);
    }
    const char* const close = std::find(at, end, '}');
    parse_unit({at, static_cast<std::size_t>(close - at)});
    return close;
  }

  template <class Out>
  Out write(Out out, Bytes bytes) const {
    const std::string text = format_.text(bytes.count);
    const std::size_t space = width_ - std::min(width_, text.size());
    const std::size_t left = align_ == '<' ? 0 : align_ == '^' ? space / 2 : space;
    out = fill(out, left);
    out = std::copy(text.begin(), text.end(), out);
    return fill(out, space - left);
  }

 private:
  static constexpr std::size_t most_width = 10000;
  static constexpr std::size_t most_digits = 18;

  // Not constexpr, so that a call during the check of a format string is a compile-time error.
  [[noreturn]] static void format_is_wrong(const char* what) { throw_error(fmt::format_error{what}); }

  [[nodiscard]] static constexpr bool is_align(char c) { return c == '<' || c == '^' || c == '>'; }

  constexpr const char* parse_align(const char* at, const char* end) {
    if (at == end || *at == '}') return at;
    // A fill may be any UTF-8 character but a brace, and counts as a fill only if an alignment follows.
    const auto lead = static_cast<unsigned char>(*at);
    const std::ptrdiff_t bytes = lead < 0x80U ? 1 : lead < 0xE0U ? 2 : lead < 0xF0U ? 3 : 4;
    if (end - at > bytes && is_align(at[bytes]) && *at != '{') {
      std::copy(at, at + bytes, fill_.begin());
      fill_bytes_ = static_cast<std::size_t>(bytes);
      align_ = at[bytes];
      return at + bytes + 1;
    }
    if (is_align(*at)) align_ = *at++;
    return at;
  }

  static constexpr const char* parse_number(const char* at, const char* end, std::size_t& number,
                                            std::size_t most) {
    number = 0;
    for (; at != end && *at >= '0' && *at <= '9'; ++at) {
      number = 10 * number + static_cast<std::size_t>(*at - '0');
      if (number > most) format_is_wrong("Bytes: a width is at most 10000, and 18 decimals");
    }
    return at;
  }

  constexpr void parse_unit(std::string_view name) {
    if (name.empty()) return;
    format_.binary = name.size() > 1 && name[name.size() - 2] == 'i';
    if (name == "iB") return;
    const auto& units = format_.binary ? binary_units : decimal_units;
    for (std::size_t i = 0; i < units.size(); ++i) {
      if (units[i].name == name) format_.unit = static_cast<int>(i);
    }
    if (format_.unit < 0) {
      format_is_wrong(
          "Bytes: a format is [[fill]align][width][.digits][unit], the unit one of B, kB, MB, "
          "GB, TB, PB, EB, KiB, MiB, GiB, TiB, PiB, EiB, or iB for one that fits");
    }
    if (format_.unit == 0 && format_.digits >= 0) {
      format_is_wrong("Bytes: whole bytes have no decimals");
    }
  }

  template <class Out>
  Out fill(Out out, std::size_t times) const {
    for (; times > 0; --times) out = std::copy_n(fill_.begin(), fill_bytes_, out);
    return out;
  }

  ByteFormat format_;
  std::size_t width_ = 0;
  std::array<char, 4> fill_{' ', 0, 0, 0};
  std::size_t fill_bytes_ = 1;
  char align_ = '>';
};

}  // namespace detail
}  // namespace kvpolicy

/// @cond
template <>
struct fmt::formatter<kvpolicy::Bytes, char> {
  constexpr auto parse(fmt::format_parse_context& context) -> decltype(context.begin()) {
    return spec_.parse(context.begin(), context.end());
  }
  template <class Context>
  auto format(kvpolicy::Bytes bytes, Context& context) const -> decltype(context.out()) {
    return spec_.write(context.out(), bytes);
  }

 private:
  kvpolicy::detail::BytesSpec spec_;
};
/// @endcond
