# Compiles the Triton kernels of the encoders in advance, so that no process has to.

# Adds a target that writes one file for each architecture of the CUDA library that Triton knows;
# `note` becomes their names, or the reason why there is none. A failure of the target leaves the files
# out: the kernels are then compiled where they are needed.
function(add_encoder_kernels architectures torch_dir destination note)
  find_package(Python COMPONENTS Interpreter)
  if(NOT Python_Interpreter_FOUND)
    set(${note} "not built: no Python found" PARENT_SCOPE)
    return()
  endif()
  # torch and Triton may be installed beside an environment that is isolated from them. pip isolates
  # by a module on its PYTHONPATH, which removes them from the path.
  cmake_path(GET torch_dir PARENT_PATH packages)
  cmake_path(GET CMAKE_CURRENT_SOURCE_DIR PARENT_PATH root)
  set(python "${CMAKE_COMMAND}" -E env "PYTHONPATH=${root}:${packages}"
      "TRITON_CACHE_DIR=${CMAKE_CURRENT_BINARY_DIR}/triton" "${Python_EXECUTABLE}")
  execute_process(COMMAND ${python} -c "import numpy, torch, triton" RESULT_VARIABLE failed
                  OUTPUT_QUIET ERROR_QUIET)
  if(failed)
    set(${note} "not built: ${Python_EXECUTABLE} cannot import triton" PARENT_SCOPE)
    return()
  endif()
  file(GLOB sources CONFIGURE_DEPENDS "${root}/pruned_rnnt/model/kernels/*.py"
       "${root}/pruned_rnnt/train/optim/scaled_adam_kernels.py")
  set(known 80 86 89 90 100 103 120 121)
  set(files "")
  foreach(arch IN LISTS architectures)
    string(REGEX MATCH "^[0-9]+" capability "${arch}")
    if(arch MATCHES "-virtual$")
      continue()
    endif()
    set(name "encoder_kernels_${capability}.zip")
    if(NOT capability IN_LIST known OR name IN_LIST files)
      continue()
    endif()
    list(APPEND files "${name}")
    add_custom_command(
      OUTPUT "${name}"
      COMMAND ${python} -m scripts.compile_kernels "${CMAKE_CURRENT_BINARY_DIR}"
              --capabilities ${capability}
              || "${CMAKE_COMMAND}" -E echo "pruned_rnnt: no encoder kernels were compiled in advance"
      DEPENDS ${sources} "${root}/scripts/compile_kernels.py"
      WORKING_DIRECTORY "${root}"
      COMMENT "Compiling the encoders' kernels for compute capability ${capability}"
      USES_TERMINAL VERBATIM)
    install(FILES "${CMAKE_CURRENT_BINARY_DIR}/${name}" DESTINATION "${destination}" OPTIONAL)
  endforeach()
  if(NOT files)
    set(${note} "not built: Triton has no machine code for ${architectures}" PARENT_SCOPE)
    return()
  endif()
  add_custom_target(pruned_rnnt_encoder_kernels ALL DEPENDS ${files})
  set(${note} "built: ${files}" PARENT_SCOPE)
endfunction()
