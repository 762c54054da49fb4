//! An agent of NIXL with its memory, its peers and its reads: the safe level.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_int, c_void};
use std::fmt;
use std::ptr::null_mut;
use std::sync::Arc;

use crate::memory::Region;
use crate::nixl::{self, AgentConfig, Handle, Nixl, Status};

/// The plugin that moves memory between processes and hosts.
const BACKEND: &CStr = c"UCX";
/// How often the library's own thread looks for peers' requests without being woken, in microseconds. It is woken by its sockets; this is
/// the net below them, which the library asks for.
const IDLE_LOOK_MICROSECONDS: u64 = 5_000;

/// What NIXL would not do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("NIXL cannot {operation}: {}", name_of(.status))]
pub struct NixlError {
    operation: &'static str,
    status: c_int,
}

impl NixlError {
    /// Nothing to read into. (A claim is admitted only under a grant, and that only with a region.)
    pub(crate) fn no_region() -> Self {
        Self { operation: "read without a region", status: -3 }
    }
}

fn name_of(status: &Status) -> String {
    match status {
        -1 => "an argument is invalid".into(),
        -2 => "the backend failed".into(),
        -3 => "the state does not allow it".into(),
        -4 => "an exception was thrown".into(),
        -6 => "it is not known".into(),
        other => format!("status {other}"),
    }
}

fn check(operation: &'static str, status: Status) -> Result<(), NixlError> {
    if status == nixl::SUCCESS { Ok(()) } else { Err(NixlError { operation, status }) }
}

/// Which part an agent plays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// Peers read from it: a thread of the library serves those whose bytes do not move without one.
    Serves,
    /// It reads, and is moved on by being asked.
    Reads,
}

/// Copies from a peer's memory into ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReadRun {
    /// First byte in our region.
    pub(crate) offset: usize,
    /// Address of the first byte in the peer.
    pub(crate) from: usize,
    pub(crate) num_bytes: usize,
}

/// A read of this agent; never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ReadId(pub(crate) u64);

/// How a read ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// All bytes are there.
    Done,
    /// It failed. **Parts of it may still be under way**: the library gives a request up when one of its lanes fails. Only the end of the
    /// agent is the end of them.
    Failed,
}

/// An agent. Dropping it closes its connections and takes its memory from the network: from then on nothing lands in it.
pub(crate) struct Agent {
    nixl: Nixl,
    handle: Handle,
    backend: Handle,
    /// Names the backend in every call that chooses one.
    options: Handle,
    region: Arc<Region>,
    reads: BTreeMap<ReadId, Handle>,
    last_read: u64,
}

// SAFETY: the library binds nothing of an agent to a thread; all calls are made through `&self` or `&mut self` of a value that is not
// `Sync`, so by one thread at a time.
unsafe impl Send for Agent {}

impl fmt::Debug for Agent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Agent").field("reads", &self.reads.len()).finish_non_exhaustive()
    }
}

impl Agent {
    /// Makes an agent whose memory is `region`. The name must be unique among all that it ever meets.
    pub(crate) fn new(nixl: &Nixl, name: &str, part: Part, region: Arc<Region>) -> Result<Self, NixlError> {
        let functions = nixl.functions();
        let name = CString::new(name).map_err(|_| NixlError { operation: "take a name", status: -1 })?;
        let config = AgentConfig {
            enable_prog_thread: part == Part::Serves,
            enable_listen_thread: false,
            listen_port: 0,
            thread_sync: 0,
            num_workers: 1,
            pthr_delay_us: IDLE_LOOK_MICROSECONDS,
            lthr_delay_us: 100_000,
            capture_telemetry: false,
        };
        let mut handle = null_mut();
        // SAFETY: the pointers are to values that live during the call.
        let status =
            unsafe { (functions.create_configured_agent)(name.as_ptr(), &raw const config, &raw mut handle) };
        check("make an agent", status)?;
        // From here on, what exists is destroyed with the value.
        let reads = BTreeMap::new();
        let mut agent = Self {
            nixl: nixl.clone(),
            handle,
            backend: null_mut(),
            options: null_mut(),
            region,
            reads,
            last_read: 0,
        };
        agent.open_backend()?;
        agent.register()?;
        Ok(agent)
    }

    fn open_backend(&mut self) -> Result<(), NixlError> {
        let functions = self.nixl.functions();
        let (mut memories, mut parameters) = (null_mut(), null_mut());
        // SAFETY: the agent lives; the pointers are to live handles.
        let status = unsafe {
            (functions.get_plugin_params)(
                self.handle,
                BACKEND.as_ptr(),
                &raw mut memories,
                &raw mut parameters,
            )
        };
        check("load its plugin UCX", status)?;
        // SAFETY: the list was made above and is not used again.
        unsafe { (functions.destroy_mem_list)(memories) };
        // SAFETY: agent and parameters live; the pointer is to a live handle.
        let status = unsafe {
            (functions.create_backend)(self.handle, BACKEND.as_ptr(), parameters, &raw mut self.backend)
        };
        // SAFETY: the parameters were copied, and are not used again.
        unsafe { (functions.destroy_params)(parameters) };
        check("open its backend UCX", status)?;
        // SAFETY: the pointer is to a live handle.
        check("make options", unsafe { (functions.create_opt_args)(&raw mut self.options) })?;
        // SAFETY: both were made above.
        check("choose its backend", unsafe { (functions.opt_args_add_backend)(self.options, self.backend) })
    }

    fn register(&self) -> Result<(), NixlError> {
        let functions = self.nixl.functions();
        let mut list = null_mut();
        // SAFETY: the pointer is to a live handle.
        check("make a list", unsafe { (functions.create_reg_dlist)(nixl::DRAM, &raw mut list) })?;
        let (base, num_bytes) = (self.region.base(), self.region.num_bytes());
        // SAFETY: the list was made above; no metadata is given.
        let mut status =
            unsafe { (functions.reg_dlist_add_desc)(list, base, num_bytes, 0, std::ptr::null(), 0) };
        if status == nixl::SUCCESS {
            // SAFETY: the memory is the region's, which this value keeps until the agent is destroyed.
            status = unsafe { (functions.register_mem)(self.handle, list, self.options) };
        }
        // SAFETY: the list was copied, and is not used again.
        unsafe { (functions.destroy_reg_dlist)(list) };
        check("register memory", status)
    }

    /// Returns the agent's memory.
    pub(crate) fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Returns what peers must load to read from this agent.
    pub(crate) fn metadata(&self) -> Result<Vec<u8>, NixlError> {
        let (mut data, mut num_bytes) = (null_mut(), 0);
        // SAFETY: the agent lives, and the pointers are to live values.
        let status =
            unsafe { (self.nixl.functions().get_local_md)(self.handle, &raw mut data, &raw mut num_bytes) };
        check("say how it is reached", status)?;
        // SAFETY: the library allocated that many bytes and gave them to us.
        let bytes = unsafe { std::slice::from_raw_parts(data.cast::<u8>(), num_bytes) }.to_vec();
        // SAFETY: they came from the C library's allocator, and are not used again.
        unsafe { free(data) };
        Ok(bytes)
    }

    /// Loads a peer's metadata, and returns the peer's name.
    pub(crate) fn meet(&self, metadata: &[u8]) -> Result<CString, NixlError> {
        let mut name = null_mut();
        // SAFETY: the bytes live during the call; the pointer is to a live value.
        let status = unsafe {
            (self.nixl.functions().load_remote_md)(
                self.handle,
                metadata.as_ptr().cast(),
                metadata.len(),
                &raw mut name,
            )
        };
        check("load a peer's metadata", status)?;
        // SAFETY: the library allocated a string with its end and gave it to us.
        let owned = unsafe { CStr::from_ptr(name) }.to_owned();
        // SAFETY: it came from the C library's allocator, and is not used again.
        unsafe { free(name.cast()) };
        Ok(owned)
    }

    /// Closes the connection to a peer, which must have no reads under way. A peer that is not known (any more) is forgotten already.
    pub(crate) fn forget(&self, peer: &CStr) {
        // SAFETY: the agent lives, and the name during the call.
        unsafe { (self.nixl.functions().invalidate_remote_md)(self.handle, peer.as_ptr()) };
    }

    /// Begins to read from a peer.
    ///
    /// # Errors
    /// As [`Ended::Failed`]: parts of the read may be under way.
    ///
    /// # Panics
    /// If a run does not lie in our region.
    pub(crate) fn read(&mut self, peer: &CStr, runs: &[ReadRun]) -> Result<ReadId, NixlError> {
        let functions = self.nixl.functions();
        let (mut into, mut from) = (List::new(functions)?, List::new(functions)?);
        for run in runs {
            into.add(self.region.at(run.offset, run.num_bytes), run.num_bytes)?;
            from.add(run.from, run.num_bytes)?;
        }
        let mut request = null_mut();
        // SAFETY: agent, lists and options live, and the name during the call. What is written lies in our region (checked above), which
        // outlives the agent; that nothing else is there to race with is the page rule.
        let status = unsafe {
            (functions.create_xfer_req)(
                self.handle,
                nixl::READ,
                into.handle,
                from.handle,
                peer.as_ptr(),
                &raw mut request,
                self.options,
            )
        };
        check("prepare a read", status)?;
        // SAFETY: the request was made above and is kept until it is released.
        let status = unsafe { (functions.post_xfer_req)(self.handle, request, null_mut()) };
        if status < 0 {
            self.release(request);
            return Err(NixlError { operation: "begin a read", status });
        }
        self.last_read += 1;
        let id = ReadId(self.last_read);
        self.reads.insert(id, request);
        Ok(id)
    }

    /// Moves all reads on, and returns those that have ended.
    pub(crate) fn progress(&mut self) -> Vec<(ReadId, Ended)> {
        let mut ended = Vec::new();
        for (id, request) in &self.reads {
            // SAFETY: both live.
            match unsafe { (self.nixl.functions().get_xfer_status)(self.handle, *request) } {
                nixl::SUCCESS => ended.push((*id, Ended::Done)),
                nixl::IN_PROGRESS => {}
                _ => ended.push((*id, Ended::Failed)),
            }
        }
        for (id, _) in &ended {
            if let Some(request) = self.reads.remove(id) {
                self.release(request);
            }
        }
        ended
    }

    /// Says whether no read is under way that has not ended.
    pub(crate) fn is_idle(&self) -> bool {
        self.reads.is_empty()
    }

    fn release(&self, request: Handle) {
        let functions = self.nixl.functions();
        // SAFETY: agent and request live; the request is not used again but to be destroyed.
        let status = unsafe { (functions.release_xfer_req)(self.handle, request) };
        if status == nixl::SUCCESS {
            // SAFETY: it holds nothing any more.
            unsafe { (functions.destroy_xfer_req)(request) };
        } else {
            tracing::warn!(status, "NIXL keeps a request that it was asked to release");
        }
    }
}

impl Agent {
    /// Ends the agent, as dropping it does. Says whether the library did so: only then nothing lands in its memory any more.
    #[must_use]
    pub(crate) fn end(mut self) -> bool {
        self.close()
    }

    fn close(&mut self) -> bool {
        if self.handle.is_null() {
            return true;
        }
        for (_, request) in std::mem::take(&mut self.reads) {
            self.release(request);
        }
        let functions = self.nixl.functions();
        // SAFETY: each was made by `new` or is null, which is refused; none is used again. The region goes after this.
        unsafe { (functions.destroy_opt_args)(self.options) };
        // SAFETY: as above.
        unsafe { (functions.destroy_backend)(self.backend) };
        // SAFETY: as above.
        let status = unsafe { (functions.destroy_agent)(std::mem::replace(&mut self.handle, null_mut())) };
        if status != nixl::SUCCESS {
            tracing::error!(status, "NIXL does not end an agent");
            // Whatever may land there still must not land in somebody else's memory.
            std::mem::forget(self.region.clone());
        }
        status == nixl::SUCCESS
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.close();
    }
}

/// A list of pieces of memory, destroyed with the value.
struct List<'a> {
    functions: &'a nixl::Functions,
    handle: Handle,
}

impl<'a> List<'a> {
    fn new(functions: &'a nixl::Functions) -> Result<Self, NixlError> {
        let mut handle = null_mut();
        // SAFETY: the pointer is to a live handle.
        check("make a list", unsafe { (functions.create_xfer_dlist)(nixl::DRAM, &raw mut handle) })?;
        Ok(Self { functions, handle })
    }

    fn add(&mut self, address: usize, num_bytes: usize) -> Result<(), NixlError> {
        // SAFETY: the list lives; addresses are only noted.
        check("note a run", unsafe {
            (self.functions.xfer_dlist_add_desc)(self.handle, address, num_bytes, 0)
        })
    }
}

impl Drop for List<'_> {
    fn drop(&mut self) {
        // SAFETY: the list was made by `new`; requests hold copies.
        unsafe { (self.functions.destroy_xfer_dlist)(self.handle) };
    }
}

// The C library's; std links it.
unsafe extern "C" {
    fn free(pointer: *mut c_void);
}
