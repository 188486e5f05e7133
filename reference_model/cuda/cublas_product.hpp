// SPDX-License-Identifier: Apache-2.0
//
// Matrix products through cuBLASLt, which stores matrices by columns. A row-major [a, b] is its [b,
// a] with leading dimension b, so y = x Wᵀ is computed as yᵀ = W xᵀ.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <type_traits>
#include <utility>

#include <cublasLt.h>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/cuda/memory.hpp>
#include <reference_model/cuda/product_shape.hpp>

namespace kvpolicy::reference {

/// @throws std::bad_alloc if memory ran out, DeviceError for all other errors
inline void check_cublas(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  if (status == CUBLAS_STATUS_ALLOC_FAILED) throw std::bad_alloc{};
  throw DeviceError{message("cuBLASLt: ", what, " failed: ", cublasLtGetStatusName(status), " (",
                            cublasLtGetStatusString(status), ")")};
}

class Product {
 public:
  Product(gpu::MemoryResource* memory, cudaStream_t stream) {
    cublasLtHandle_t handle = nullptr;
    check_cublas(cublasLtCreate(&handle), "cublasLtCreate");
    handle_.reset(handle);
    workspace_ = gpu::allocate(memory, workspace_bytes(), stream);
  }

  /// NVIDIA's recommendation for Hopper; older devices need less.
  [[nodiscard]] std::size_t workspace_bytes() const { return std::size_t{32} << 20; }

  void multiply(const ProductShape& shape, const bfloat16* weight, const void* bias, const bfloat16* x,
                void* y, cudaStream_t stream) {
    const cudaDataType_t out = shape.rounded ? CUDA_R_16BF : CUDA_R_32F;
    Plan& plan =
        plan_for(shape, [&] { return make_plan(shape, CUBLAS_COMPUTE_32F, CUDA_R_32F, CUDA_R_16BF, out); });
    if (shape.bias) plan.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
    const float one = 1.0F;
    const float kept = shape.added ? 1.0F : 0.0F;
    run(plan, &one, weight, x, &kept, y, stream);
  }

  void multiply_int8(std::size_t inputs, std::size_t outputs, std::size_t rows, const std::int8_t* weight,
                     const std::int8_t* x, int* y, cudaStream_t stream) {
    const ProductShape shape{.inputs = inputs, .outputs = outputs, .rows = rows};
    Plan& plan = plan_for_int8(shape);
    const std::int32_t one = 1;
    const std::int32_t none = 0;
    run(plan, &one, weight, x, &none, y, stream);
  }

 private:
  template <class T, cublasStatus_t (*Destroy)(T)>
  struct Destroyer {
    using pointer = T;
    void operator()(T object) const { static_cast<void>(Destroy(object)); }
  };
  using Handle = std::unique_ptr<void, Destroyer<cublasLtHandle_t, cublasLtDestroy>>;
  using Layout = std::unique_ptr<void, Destroyer<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>>;
  using Operation = std::unique_ptr<void, Destroyer<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>>;
  using Preference =
      std::unique_ptr<void, Destroyer<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>>;

  // Descriptors and algorithm for products of one shape, made when the shape is first used.
  struct Plan {
    Operation operation;
    Layout weight, x, y;
    cublasLtMatmulAlgo_t algorithm{};

    template <class T>
    void set(cublasLtMatmulDescAttributes_t attribute, const T& value) {
      check_cublas(cublasLtMatmulDescSetAttribute(operation.get(), attribute, &value, sizeof value),
                   "cublasLtMatmulDescSetAttribute");
    }
  };
  using Plans = std::map<ProductShape, Plan>;

  template <class Make>
  Plan& plan_for(const ProductShape& shape, Make make) {
    const auto found = plans_.find(shape);
    return found != plans_.end() ? found->second : plans_.emplace(shape, make()).first->second;
  }
  Plan& plan_for_int8(const ProductShape& shape) {
    const auto found = int8_plans_.find(shape);
    if (found != int8_plans_.end()) return found->second;
    return int8_plans_.emplace(shape, make_plan(shape, CUBLAS_COMPUTE_32I, CUDA_R_32I, CUDA_R_8I, CUDA_R_32I))
        .first->second;
  }

  [[nodiscard]] static Layout layout(cudaDataType_t type, std::size_t columns, std::size_t rows) {
    cublasLtMatrixLayout_t made = nullptr;
    check_cublas(cublasLtMatrixLayoutCreate(&made, type, columns, rows, static_cast<std::int64_t>(columns)),
                 "cublasLtMatrixLayoutCreate");
    return Layout{made};
  }

  [[nodiscard]] Plan make_plan(const ProductShape& shape, cublasComputeType_t compute, cudaDataType_t scale,
                               cudaDataType_t in, cudaDataType_t out) {
    Plan plan;
    cublasLtMatmulDesc_t operation = nullptr;
    check_cublas(cublasLtMatmulDescCreate(&operation, compute, scale), "cublasLtMatmulDescCreate");
    plan.operation.reset(operation);
    plan.set(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
    if (shape.bias) {
      plan.set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
      plan.set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, out);
      // Without a pointer there may be no algorithm for the epilogue; each call brings its own.
      plan.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<const void*>(workspace_.get()));
    }
    plan.weight = layout(in, shape.inputs, shape.outputs);
    plan.x = layout(in, shape.inputs, shape.rows);
    plan.y = layout(out, shape.outputs, shape.rows);

    cublasLtMatmulPreference_t made = nullptr;
    check_cublas(cublasLtMatmulPreferenceCreate(&made), "cublasLtMatmulPreferenceCreate");
    const Preference preference{made};
    const std::size_t most = workspace_bytes();
    check_cublas(cublasLtMatmulPreferenceSetAttribute(made, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &most,
                                                      sizeof most),
                 "cublasLtMatmulPreferenceSetAttribute");
    cublasLtMatmulHeuristicResult_t best{};
    int found = 0;
    const cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(handle_.get(), plan.operation.get(), plan.weight.get(), plan.x.get(),
                                       plan.y.get(), plan.y.get(), made, 1, &best, &found);
    if (status != CUBLAS_STATUS_SUCCESS || found == 0) {
      throw DeviceError{message("cuBLASLt: no algorithm for a product of [", shape.rows, ", ", shape.inputs,
                                "] and [", shape.outputs, ", ", shape.inputs,
                                "]: ", cublasLtGetStatusName(status))};
    }
    plan.algorithm = best.algo;
    return plan;
  }

  void run(Plan& plan, const void* one, const void* weight, const void* x, const void* kept, void* y,
           cudaStream_t stream) {
    check_cublas(cublasLtMatmul(handle_.get(), plan.operation.get(), one, weight, plan.weight.get(), x,
                                plan.x.get(), kept, y, plan.y.get(), y, plan.y.get(), &plan.algorithm,
                                workspace_.get(), workspace_bytes(), stream),
                 "cublasLtMatmul");
  }

  Handle handle_;
  gpu::DeviceBuffer workspace_;
  Plans plans_;
  Plans int8_plans_;
};

}  // namespace kvpolicy::reference
