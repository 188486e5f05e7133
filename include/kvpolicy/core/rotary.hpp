// SPDX-License-Identifier: Apache-2.0
//
// Rotary position embedding (Su et al., arXiv:2104.09864) in the form that Llama checkpoints use: channel i
// is rotated together with channel i + head_dim / 2. Supports plain frequencies, linear interpolation, and
// Llama 3's scaling by wavelength.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numbers>
#include <span>
#include <string_view>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/fields.hpp>

namespace kvpolicy {

/// A model's rotary embedding; the defaults are Llama 2's.
struct RotaryConfig {
  enum class Scaling : std::uint8_t { none, linear, llama3 };

  double theta = 10000.0;
  Scaling scaling = Scaling::none;
  double factor = 1.0;                    ///< linear and llama3: by how much positions are stretched.
  double low_freq_factor = 1.0;           ///< llama3 only.
  double high_freq_factor = 4.0;          ///< llama3 only.
  double original_max_position = 8192.0;  ///< llama3 only.

  friend bool operator==(const RotaryConfig&, const RotaryConfig&) = default;
  /// The names of the enumerators in files.
  friend constexpr std::array<std::string_view, 3> names_of(Scaling) { return {"none", "linear", "llama3"}; }
  void fields(FieldVisitor& visit) {
    visit("theta", theta);
    visit("scaling", scaling);
    visit("factor", factor);
    visit("low_freq_factor", low_freq_factor);
    visit("high_freq_factor", high_freq_factor);
    visit("original_max_position", original_max_position);
  }

  void validate() const {
    // Written so that NaN fails.
    require(theta > 0 && std::isfinite(theta), "RotaryConfig: theta is ", theta, ", must be positive");
    require(factor > 0 && std::isfinite(factor), "RotaryConfig: factor is ", factor, ", must be positive");
    if (scaling != Scaling::llama3) return;
    require(low_freq_factor > 0 && high_freq_factor > low_freq_factor && std::isfinite(high_freq_factor),
            "RotaryConfig: llama3 needs 0 < low_freq_factor < high_freq_factor, got ", low_freq_factor,
            " and ", high_freq_factor);
    require(original_max_position > 0 && std::isfinite(original_max_position),
            "RotaryConfig: original_max_position is ", original_max_position, ", must be positive");
  }
};

/// Radians per position of each channel pair: [head_dim / 2].
/// @throws ConfigError for an odd head_dim or a config that does not validate.
[[nodiscard]] inline std::vector<float> inverse_frequencies(const RotaryConfig& config,
                                                            std::size_t head_dim) {
  config.validate();
  require(head_dim > 0 && head_dim % 2 == 0, "inverse_frequencies: head_dim is ", head_dim, ", must be even");
  std::vector<float> frequencies(head_dim / 2);
  for (std::size_t pair = 0; pair < frequencies.size(); ++pair) {
    const double exponent = static_cast<double>(2 * pair) / static_cast<double>(head_dim);
    double frequency = 1.0 / std::pow(config.theta, exponent);
    if (config.scaling == RotaryConfig::Scaling::linear) {
      frequency /= config.factor;
    } else if (config.scaling == RotaryConfig::Scaling::llama3) {
      // Short waves stay, long waves are stretched, and those between are blended.
      const double wavelength = 2.0 * std::numbers::pi / frequency;
      const double turns = config.original_max_position / wavelength;
      if (turns < config.low_freq_factor) {
        frequency /= config.factor;
      } else if (turns < config.high_freq_factor) {
        const double blend =
            (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor);
        frequency = (1.0 - blend) * frequency / config.factor + blend * frequency;
      }
    }
    frequencies[pair] = static_cast<float>(frequency);
  }
  return frequencies;
}

/// Rotates a row [head_dim] by `positions` positions, in place; a negative number rotates it back.
inline void rotate(std::span<float> row, std::span<const float> frequencies, std::int64_t positions) {
  const std::size_t pairs = frequencies.size();
  KVPOLICY_ASSERT(row.size() == 2 * pairs);
  for (std::size_t pair = 0; pair < pairs; ++pair) {
    // The product is computed in double: at a million positions a float angle is off by a tenth of a
    // radian.
    const double angle = static_cast<double>(positions) * static_cast<double>(frequencies[pair]);
    const auto cosine = static_cast<float>(std::cos(angle));
    const auto sine = static_cast<float>(std::sin(angle));
    const float low = row[pair];
    const float high = row[pair + pairs];
    row[pair] = low * cosine - high * sine;
    row[pair + pairs] = high * cosine + low * sine;
  }
}

}  // namespace kvpolicy
