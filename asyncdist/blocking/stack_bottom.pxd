cdef extern from *:
    """
    #if defined(__linux__) && defined(__GCC_HAVE_DWARF2_CFI_ASM) && defined(__x86_64__)
    #define END_BACKTRACES() __asm__ volatile (".cfi_undefined rip")
    #elif defined(__linux__) && defined(__GCC_HAVE_DWARF2_CFI_ASM) && defined(__aarch64__)
    #define END_BACKTRACES() __asm__ volatile (".cfi_undefined x30")
    #else
    #define END_BACKTRACES() ((void)0)
    #endif
    #if defined(__GNUC__)
    #define NOT_INLINED __attribute__((noinline))
    #else
    #define NOT_INLINED
    #endif

    /* Calls a function. To an unwinder, this frame has no return address, so it is the last one. */
    static NOT_INLINED PyObject *call_without_caller(PyObject *fn, PyObject *args, PyObject *kwargs) {
        PyObject *volatile value;  /* written after the call, so the call is not a jump that drops this frame */
        END_BACKTRACES();
        value = PyObject_Call(fn, args, kwargs);
        return value;
    }
    """
    object call_without_caller(object fn, object args, object kwargs)
