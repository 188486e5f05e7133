// SPDX-License-Identifier: Apache-2.0
#include <reference_model/operations.hpp>

#include <cmath>

#include <reference_model/parallel.hpp>

namespace kvpolicy::reference {

void normalise(const float* x, std::size_t rows, const std::vector<float>& weight, float eps,
               float* out) {
  const std::size_t width = weight.size();
  for (std::size_t row = 0; row < rows; ++row, x += width, out += width) {
    float squares = 0.0F;
    for (std::size_t i = 0; i < width; ++i) squares += x[i] * x[i];
    const float scale = 1.0F / std::sqrt(squares / static_cast<float>(width) + eps);
    for (std::size_t i = 0; i < width; ++i) out[i] = x[i] * scale * weight[i];
  }
}

void swiglu(float* gate, const float* up, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) gate[i] *= up[i] / (1.0F + std::exp(-gate[i]));
}

Rotation::Rotation(std::span<const std::size_t> positions, std::span<const float> frequencies)
    : pairs_{frequencies.size()},
      cosine_(positions.size() * pairs_),
      sine_(positions.size() * pairs_) {
  for_each_row_block(positions.size(), [&](std::size_t first, std::size_t count) {
    for (std::size_t i = first * pairs_; i < (first + count) * pairs_; ++i) {
      // The product is in double, as in kvpolicy::rotate, which rotates sinks by the same angles.
      const double angle = static_cast<double>(positions[i / pairs_]) *
                           static_cast<double>(frequencies[i % pairs_]);
      cosine_[i] = static_cast<float>(std::cos(angle));
      sine_[i] = static_cast<float>(std::sin(angle));
    }
  });
}

void Rotation::rotate(float* x, std::size_t heads, std::size_t first, std::size_t count,
                    float direction) const {
  for (std::size_t token = first; token < first + count; ++token) {
    const float* c = cosine_.data() + token * pairs_;
    const float* s = sine_.data() + token * pairs_;
    for (std::size_t head = 0; head < heads; ++head) {
      float* low = x + (token * heads + head) * 2 * pairs_;
      float* high = low + pairs_;
      for (std::size_t i = 0; i < pairs_; ++i) {
        const float a = low[i];
        const float b = high[i];
        const float sine = direction * s[i];
        low[i] = a * c[i] - b * sine;
        high[i] = b * c[i] + a * sine;
      }
    }
  }
}

}  // namespace kvpolicy::reference
