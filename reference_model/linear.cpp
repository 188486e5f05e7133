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

/// oneDNN gives every product to all threads, however small, and within a product they wait for
/// each other without sleeping: next to other programs, whole time slices long, a hundred times
/// the product itself. So many rows are cut into blocks, each one thread's own, and few rows stay
/// on one thread unless the weights alone take a millisecond to read.
class OneThreadIfSmall {
 public:
  explicit OneThreadIfSmall(std::size_t weights) {
    if (weights < (std::size_t{1} << 22)) omp_set_num_threads(1);
  }
  OneThreadIfSmall(const OneThreadIfSmall&) = delete;
  OneThreadIfSmall& operator=(const OneThreadIfSmall&) = delete;
  ~OneThreadIfSmall() { omp_set_num_threads(threads_); }

 private:
  int threads_ = omp_get_max_threads();  // of this thread alone: callers side by side are safe
};
#else
// A BLAS with threads of its own keeps them behind one lock: blocks would only queue for it.
constexpr bool one_thread_per_block = false;

struct OneThreadIfSmall {
  explicit OneThreadIfSmall(std::size_t) {}
};
#endif

/// y [rows, outputs] = x [rows, inputs] Wᵀ + scale * y, all row-major. A single row is a
/// matrix-vector product, for which both libraries have a path of their own.
void multiply(const float* x, std::size_t rows, const Linear& layer, float scale, float* y) {
#if defined(KVPOLICY_WITH_ONEDNN)
  const auto m = static_cast<dnnl_dim_t>(rows);
  const auto n = static_cast<dnnl_dim_t>(layer.outputs);
  const auto k = static_cast<dnnl_dim_t>(layer.inputs);
  const OneThreadIfSmall guard{layer.weight.size()};
  const dnnl_status_t status =
      dnnl_sgemm('N', 'T', m, n, k, 1.0F, x, k, layer.weight.data(), k, scale, y, n);
  require<ShapeError>(status == dnnl_success, "oneDNN refused a product of [", m, ", ", k,
                      "] and [", n, ", ", k, "]: status ", static_cast<int>(status));
#else
  const auto m = static_cast<blasint>(rows);
  const auto n = static_cast<blasint>(layer.outputs);
  const auto k = static_cast<blasint>(layer.inputs);
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, m, n, k, 1.0F, x, k, layer.weight.data(), k,
              scale, y, n);
#endif
}

}  // namespace

void Linear::apply(const float* x, std::size_t rows, float* y) const {
  // The bias goes in first, and the product on top: one pass over y less.
  for (std::size_t row = 0; row < rows && !bias.empty(); ++row) {
    std::ranges::copy(bias, y + row * outputs);
  }
  multiply(x, rows, *this, bias.empty() ? 0.0F : 1.0F, y);
}

void Linear::add_to(const float* x, std::size_t rows, float* y) const {
  for (std::size_t row = 0; row < rows && !bias.empty(); ++row) {
    for (std::size_t i = 0; i < outputs; ++i) y[row * outputs + i] += bias[i];
  }
  multiply(x, rows, *this, 1.0F, y);
}

void for_each_row_block(std::size_t rows,
                        const std::function<void(std::size_t first, std::size_t count)>& work) {
  // Large enough for the matrix products, small enough that a thread which lost its core for a
  // while is not waited for long.
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
