// SPDX-License-Identifier: Apache-2.0
#include <reference_model/operations.hpp>

#include <array>
#include <cmath>

#ifdef KVPOLICY_WITH_HIGHWAY
#include <kvpolicy/cpu/vector-inl.hpp>
#endif
#include <reference_model/parallel.hpp>

namespace kvpolicy::reference {
namespace {

/// Sixteen sums side by side, which compilers keep in vectors: one sum would wait for each addition.
float sum_of_squares(const float* x, std::size_t count) {
  std::array<float, 16> sums{};
  std::size_t i = 0;
  for (; i + sums.size() <= count; i += sums.size()) {
    for (std::size_t j = 0; j < sums.size(); ++j) sums[j] += x[i + j] * x[i + j];
  }
  for (; i < count; ++i) sums[0] += x[i] * x[i];
  float sum = 0.0F;
  for (const float part : sums) sum += part;
  return sum;
}

}  // namespace

void normalise(const float* x, std::size_t rows, const std::vector<float>& weight, float eps, float* out) {
  const std::size_t width = weight.size();
  for (std::size_t row = 0; row < rows; ++row, x += width, out += width) {
    const float squares = sum_of_squares(x, width);
    const float scale = 1.0F / std::sqrt(squares / static_cast<float>(width) + eps);
    for (std::size_t i = 0; i < width; ++i) out[i] = x[i] * scale * weight[i];
  }
}

void swiglu(float* gate, const float* up, std::size_t count) {
  std::size_t i = 0;
#ifdef KVPOLICY_WITH_HIGHWAY
  // std::exp takes as long as the products of a prompt that are computed by AMX.
  namespace vectors = cpu::HWY_NAMESPACE;
  namespace hn = hwy::HWY_NAMESPACE;
  const auto one = hn::Set(vectors::floats, 1.0F);
  for (; i + vectors::lanes <= count; i += vectors::lanes) {
    const auto x = hn::LoadU(vectors::floats, gate + i);
    // Of a positive number the sigmoid is 1 / (1 + e), of a negative one e / (1 + e).
    const auto e = vectors::exp_nonpositive(hn::Neg(hn::Abs(x)));
    const auto above = hn::IfThenElse(hn::Lt(x, hn::Zero(vectors::floats)), e, one);
    const auto sigmoid = hn::Div(above, hn::Add(one, e));
    const auto product = hn::Mul(hn::Mul(x, sigmoid), hn::LoadU(vectors::floats, up + i));
    hn::StoreU(product, vectors::floats, gate + i);
  }
#endif
  for (; i < count; ++i) gate[i] *= up[i] / (1.0F + std::exp(-gate[i]));
}

Rotation::Rotation(std::span<const std::size_t> positions, std::span<const float> frequencies)
    : pairs_{frequencies.size()}, cosine_(positions.size() * pairs_), sine_(positions.size() * pairs_) {
  for_each_row_block(positions.size(), [&](std::size_t first, std::size_t count) {
    for (std::size_t i = first * pairs_; i < (first + count) * pairs_; ++i) {
      // The product is in double, as in kvpolicy::rotate, which rotates sinks by the same angles.
      const double angle =
          static_cast<double>(positions[i / pairs_]) * static_cast<double>(frequencies[i % pairs_]);
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
