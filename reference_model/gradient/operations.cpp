// SPDX-License-Identifier: Apache-2.0
#include <reference_model/gradient/operations.hpp>

#include <cmath>

namespace kvpolicy::reference {

void normalise_back(const float* x, std::size_t rows, const std::vector<float>& weight, float eps,
                    const float* dy, float* dx) {
  // y = x s w with s = (mean x² + eps)^-½, so dx = s w dy - x s³ mean(x w dy).
  const std::size_t width = weight.size();
  for (std::size_t row = 0; row < rows; ++row, x += width, dy += width, dx += width) {
    float squares = 0.0F;
    float along = 0.0F;
    for (std::size_t i = 0; i < width; ++i) {
      squares += x[i] * x[i];
      along += x[i] * weight[i] * dy[i];
    }
    const auto n = static_cast<float>(width);
    const float scale = 1.0F / std::sqrt(squares / n + eps);
    const float back = scale * scale * scale * along / n;
    for (std::size_t i = 0; i < width; ++i) dx[i] += scale * weight[i] * dy[i] - back * x[i];
  }
}

void swiglu_back(const float* gate, const float* up, std::size_t count, const float* dy, float* dgate,
                 float* dup) {
  for (std::size_t i = 0; i < count; ++i) {
    const float sigmoid = 1.0F / (1.0F + std::exp(-gate[i]));
    const float change = dy[i];
    dup[i] = change * gate[i] * sigmoid;
    dgate[i] = change * up[i] * sigmoid * (1.0F + gate[i] * (1.0F - sigmoid));
  }
}

}  // namespace kvpolicy::reference
