// SPDX-License-Identifier: Apache-2.0
#include <reference_model/linear.hpp>

#include <algorithm>
#include <exception>

#include <kvpolicy/core/error.hpp>

#if defined(KVPOLICY_WITH_ONEDNN)
#include <dnnl.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#elif defined(KVPOLICY_WITH_BLAS)
#include <cblas.h>
#else
#error "the reference model needs KVPOLICY_WITH_ONEDNN or KVPOLICY_WITH_BLAS"
#endif

namespace kvpolicy::reference {
namespace {

#if defined(KVPOLICY_WITH_ONEDNN) && defined(_OPENMP)
constexpr bool one_thread_per_block = true;

/// oneDNN divides every product among all threads, however small it is, and within a product the
/// threads wait for each other without sleeping. Beside other programs they may wait for whole time
/// slices, a hundred times the product itself. Therefore many rows are cut into blocks, each for
/// one thread, and few rows stay on one thread unless reading the weights alone takes a
/// millisecond.
class OneThreadIfSmall {
 public:
  explicit OneThreadIfSmall(std::size_t weights) {
    if (weights < (std::size_t{1} << 22)) omp_set_num_threads(1);
  }
  OneThreadIfSmall(const OneThreadIfSmall&) = delete;
  OneThreadIfSmall& operator=(const OneThreadIfSmall&) = delete;
  ~OneThreadIfSmall() { omp_set_num_threads(threads_); }

 private:
  int threads_ = omp_get_max_threads();  // of this thread only, so concurrent callers are safe
};
#else
// A BLAS with threads of its own has one lock for them, for which blocks would only queue.
constexpr bool one_thread_per_block = false;

struct OneThreadIfSmall {
  explicit OneThreadIfSmall(std::size_t) {}
};
#endif

/// The library's product; sizes have been checked. For a single row both libraries take their own
/// path for matrix-vector products.
void library_product(const MatrixView& a, const MatrixView& b, float scale, float keep, float* out,
                     std::size_t stride) {
  const std::size_t rows = a.transposed ? a.columns : a.rows;
  const std::size_t columns = b.transposed ? b.rows : b.columns;
  const std::size_t inner = a.transposed ? a.rows : a.columns;
#if defined(KVPOLICY_WITH_ONEDNN)
  const auto size = [](std::size_t n) { return static_cast<dnnl_dim_t>(n); };
  const dnnl_status_t status = dnnl_sgemm(
      a.transposed ? 'T' : 'N', b.transposed ? 'T' : 'N', size(rows), size(columns), size(inner),
      scale, a.data, size(a.stride), b.data, size(b.stride), keep, out, size(stride));
  require<ShapeError>(status == dnnl_success, "oneDNN refused a product of [", rows, ", ", inner,
                      "] and [", inner, ", ", columns, "]: status ", static_cast<int>(status));
#else
  const auto size = [](std::size_t n) { return static_cast<blasint>(n); };
  cblas_sgemm(CblasRowMajor, a.transposed ? CblasTrans : CblasNoTrans,
              b.transposed ? CblasTrans : CblasNoTrans, size(rows), size(columns), size(inner),
              scale, a.data, size(a.stride), b.data, size(b.stride), keep, out, size(stride));
#endif
}

MatrixView rows_of(const float* x, std::size_t rows, std::size_t width) {
  return {.data = x, .rows = rows, .columns = width, .stride = width};
}

MatrixView weight_of(const Linear& layer, bool transposed) {
  MatrixView view = rows_of(layer.weight.data(), layer.outputs, layer.inputs);
  view.transposed = transposed;
  return view;
}

/// y [rows, outputs] = x [rows, inputs] Wᵀ + keep * y.
void forward_product(const float* x, std::size_t rows, const Linear& layer, float keep, float* y) {
  const OneThreadIfSmall guard{layer.weight.size()};
  library_product(rows_of(x, rows, layer.inputs), weight_of(layer, true), 1.0F, keep, y,
                  layer.outputs);
}

/// dx [rows, inputs] = dy [rows, outputs] W + keep * dx.
void back_product(const float* dy, std::size_t rows, const Linear& layer, float keep, float* dx) {
  const OneThreadIfSmall guard{layer.weight.size()};
  library_product(rows_of(dy, rows, layer.outputs), weight_of(layer, false), 1.0F, keep, dx,
                  layer.inputs);
}

}  // namespace

void Linear::apply(const float* x, std::size_t rows, float* y) const {
  // The bias is written first and the product added to it, which saves a pass over y.
  for (std::size_t row = 0; row < rows && !bias.empty(); ++row) {
    std::ranges::copy(bias, y + row * outputs);
  }
  forward_product(x, rows, *this, bias.empty() ? 0.0F : 1.0F, y);
}

void Linear::add_to(const float* x, std::size_t rows, float* y) const {
  for (std::size_t row = 0; row < rows && !bias.empty(); ++row) {
    for (std::size_t i = 0; i < outputs; ++i) y[row * outputs + i] += bias[i];
  }
  forward_product(x, rows, *this, 1.0F, y);
}

void Linear::back(const float* dy, std::size_t rows, float* dx) const {
  back_product(dy, rows, *this, 0.0F, dx);
}

void Linear::add_back(const float* dy, std::size_t rows, float* dx) const {
  back_product(dy, rows, *this, 1.0F, dx);
}

void multiply(const MatrixView& a, const MatrixView& b, float scale, float keep, float* out,
              std::size_t stride) {
  const std::size_t inner = a.transposed ? a.rows : a.columns;
  const std::size_t other = b.transposed ? b.columns : b.rows;
  require<ShapeError>(inner == other, "multiply: the inner sizes are ", inner, " and ", other,
                      ", they must be the same");
  const OneThreadIfSmall guard{0};
  library_product(a, b, scale, keep, out, stride);
}

void for_each_row_block(std::size_t rows,
                        const std::function<void(std::size_t first, std::size_t count)>& work) {
  // Large enough for efficient products, small enough that other threads do not wait long for one
  // that lost its core for a while.
  constexpr std::size_t block = 64;
  if (!one_thread_per_block || rows < 4 * block) {
    work(0, rows);
    return;
  }
  std::exception_ptr failure;  // OpenMP lets no exception out of its loops
#pragma omp parallel for schedule(dynamic)
  for (std::size_t first = 0; first < rows; first += block) {
    try {
      work(first, std::min(block, rows - first));
    } catch (...) {
#pragma omp critical(kvpolicy_row_block_failure)
      if (!failure) failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

std::string_view matmul_backend() noexcept {
#if defined(KVPOLICY_WITH_ONEDNN)
  return "oneDNN";
#else
  return "BLAS";
#endif
}

}  // namespace kvpolicy::reference
