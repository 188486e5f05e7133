# SPDX-License-Identifier: Apache-2.0
#
# This port contains its sources, which ../make_port.cmake copies beside this file. In a registry these
# lines become vcpkg_from_github(OUT_SOURCE_PATH SOURCE_PATH REPO ... REF "v${VERSION}" SHA512 ...).
set(SOURCE_PATH "${CMAKE_CURRENT_LIST_DIR}/source")
if(NOT EXISTS "${SOURCE_PATH}")
  message(FATAL_ERROR "kvpolicy: this port has no sources; make one that has: "
                      "cmake -DTO=ports -P kvpolicy/packaging/vcpkg/make_port.cmake")
endif()

# There are only headers, so one configuration serves debug and release.
set(VCPKG_BUILD_TYPE release)

# A requested feature must be found, and one that is not requested must not be found by chance.
vcpkg_check_features(OUT_FEATURE_OPTIONS FEATURE_OPTIONS
    FEATURES
        cpu  CMAKE_REQUIRE_FIND_PACKAGE_hwy
        io   CMAKE_REQUIRE_FIND_PACKAGE_nlohmann_json
        format CMAKE_REQUIRE_FIND_PACKAGE_fmt
        cuda CMAKE_REQUIRE_FIND_PACKAGE_CUDAToolkit
    INVERTED_FEATURES
        cpu  CMAKE_DISABLE_FIND_PACKAGE_hwy
        cpu  CMAKE_DISABLE_FIND_PACKAGE_PkgConfig
        io   CMAKE_DISABLE_FIND_PACKAGE_nlohmann_json
        format CMAKE_DISABLE_FIND_PACKAGE_fmt
        cuda CMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit
)

vcpkg_cmake_configure(
    SOURCE_PATH "${SOURCE_PATH}"
    OPTIONS
        ${FEATURE_OPTIONS}
        -DKVPOLICY_INSTALL=ON
        -DKVPOLICY_BUILD_COMPILED=OFF
        -DKVPOLICY_BUILD_TESTS=OFF
        -DKVPOLICY_BUILD_EXAMPLES=OFF
        -DKVPOLICY_BUILD_BENCH=OFF
        -DKVPOLICY_BUILD_REFERENCE_MODEL=OFF
        -DKVPOLICY_WITH_CUDA=OFF
    MAYBE_UNUSED_VARIABLES  # CMake does not read the option of a disabled feature
        CMAKE_REQUIRE_FIND_PACKAGE_hwy
        CMAKE_REQUIRE_FIND_PACKAGE_nlohmann_json
        CMAKE_REQUIRE_FIND_PACKAGE_fmt
        CMAKE_REQUIRE_FIND_PACKAGE_CUDAToolkit
        CMAKE_DISABLE_FIND_PACKAGE_PkgConfig
)
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(CONFIG_PATH share/cmake/kvpolicy)
vcpkg_fixup_pkgconfig()

file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/share/doc")
file(INSTALL "${CMAKE_CURRENT_LIST_DIR}/usage" DESTINATION "${CURRENT_PACKAGES_DIR}/share/${PORT}")
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
