//! What a library that takes a process for its own must not do to one that it is a guest of.

use std::ffi::{c_int, c_void};

use rustix::process::Signal;

/// Room for any C library's `struct sigaction`, which is only kept and given back.
#[repr(C, align(16))]
struct Action([u8; 512]);

/// Run when the process exits, with its status and what was registered with it.
type ExitHandler = extern "C" fn(status: c_int, data: *mut c_void);

// The C library's; std links it.
unsafe extern "C" {
    safe fn _exit(status: c_int) -> !;
    fn on_exit(handler: ExitHandler, data: *mut c_void) -> c_int;
    fn sigaction(signal: c_int, new: *const Action, old: *mut Action) -> c_int;
}

/// Signals that a program may have handlers for. SIGTERM is how a daemon is asked to end in order.
const SIGNALS: [Signal; 6] =
    [Signal::HUP, Signal::INT, Signal::QUIT, Signal::TERM, Signal::USR1, Signal::USR2];

/// Calls a function that may set handlers for signals, and sets those again that were there before.
pub(crate) fn keeping_signals<T>(call: impl FnOnce() -> T) -> T {
    let before = SIGNALS.map(|signal| {
        let mut action = Action([0; 512]);
        // SAFETY: nothing is set; what is written fits into the buffer, by far.
        let code = unsafe { sigaction(signal.as_raw(), std::ptr::null(), &raw mut action) };
        (code == 0).then_some((signal, action))
    });
    let result = call();
    for (signal, action) in before.into_iter().flatten() {
        // SAFETY: the action is what the C library said that it was, and whose handler was set was there before.
        unsafe { sigaction(signal.as_raw(), &raw const action, std::ptr::null_mut()) };
    }
    result
}

/// Has `handler` run when the process exits, before all handlers that are registered already.
pub(crate) fn on_exit_first(handler: ExitHandler) -> Result<(), String> {
    // SAFETY: the handler takes no data, and is code of this program, which stays.
    match unsafe { on_exit(handler, std::ptr::null_mut()) } {
        0 => Ok(()),
        code => Err(format!("no exit handler can be registered: on_exit returned {code}")),
    }
}

/// Ends the process, running no handlers.
pub(crate) fn exit_now(status: c_int) -> ! {
    _exit(status)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    static SEEN: [AtomicU32; 2] = [AtomicU32::new(0), AtomicU32::new(0)];

    unsafe extern "C" {
        fn signal(signal: c_int, handler: extern "C" fn(c_int)) -> *const c_void;
    }

    extern "C" fn own(_: c_int) {
        SEEN[0].fetch_add(1, Ordering::SeqCst);
    }

    extern "C" fn guests(_: c_int) {
        SEEN[1].fetch_add(1, Ordering::SeqCst);
    }

    #[test]
    fn handlers_survive_a_guest() {
        let set = |handler| {
            // SAFETY: the handlers only count, which is allowed within a signal.
            unsafe { signal(Signal::USR2.as_raw(), handler) };
        };
        let raise = || rustix::process::kill_process(rustix::process::getpid(), Signal::USR2).unwrap();
        set(own);
        keeping_signals(|| set(guests));
        raise();
        while SEEN.iter().all(|seen| seen.load(Ordering::SeqCst) == 0) {
            std::thread::yield_now();
        }
        assert_eq!(SEEN.each_ref().map(|seen| seen.load(Ordering::SeqCst)), [1, 0]);
    }
}
