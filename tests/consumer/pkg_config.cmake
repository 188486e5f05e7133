# SPDX-License-Identifier: Apache-2.0
#
# Builds and runs main.cpp with only the flags that pkg-config gives.
set(ENV{PKG_CONFIG_PATH} "${PREFIX}/share/pkgconfig")
execute_process(COMMAND ${PKG_CONFIG} --modversion kvpolicy OUTPUT_VARIABLE version
                OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
if(NOT version VERSION_EQUAL VERSION)
  message(FATAL_ERROR "pkg-config says version '${version}', CMake says '${VERSION}'")
endif()
execute_process(COMMAND ${PKG_CONFIG} --cflags kvpolicy OUTPUT_VARIABLE cflags
                OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
separate_arguments(cflags UNIX_COMMAND "${cflags}")
execute_process(COMMAND ${CXX} -std=c++20 ${FLAGS} ${cflags} "${SOURCE}" -o "${PROGRAM}"
                COMMAND_ECHO STDOUT COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND "${PROGRAM}" COMMAND_ERROR_IS_FATAL ANY)
