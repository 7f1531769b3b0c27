//! A network of its own for a program, which has only the loopback interface.

use std::io;
use std::net::{SocketAddr, TcpListener};

/// Moves the calling thread, and everything that it starts, to a new network with a loopback
/// interface. Returns a listener in it at `server`, with which this process is reachable there.
///
/// # Errors
///
/// Fails without the right to create network namespaces, which mostly only root has.
#[cfg(target_os = "linux")]
pub(super) fn enter(server: Option<SocketAddr>) -> io::Result<Option<TcpListener>> {
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET)?;
    raise()?;
    server.map(TcpListener::bind).transpose()
}

#[cfg(not(target_os = "linux"))]
pub(super) fn enter(_: Option<SocketAddr>) -> io::Result<Option<TcpListener>> {
    Err(io::Error::other("only Linux has network namespaces"))
}

/// Turns on the loopback interface, which is the first in every network.
#[cfg(target_os = "linux")]
fn raise() -> io::Result<()> {
    use std::os::fd::AsRawFd;

    use nix::libc;
    use nix::sys::socket::{
        AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, socket,
    };

    const LENGTH: u32 = 32;
    const INDEX: i32 = 1;
    const FLAGS: u16 = (libc::NLM_F_REQUEST | libc::NLM_F_ACK) as u16;
    let up = libc::IFF_UP.cast_unsigned();
    // A header: length, type, flags, number and sender. Then an interface: its family, type,
    // index, flags, and the flags that change.
    let mut message = Vec::with_capacity(LENGTH as usize);
    message.extend(LENGTH.to_ne_bytes());
    message.extend(libc::RTM_NEWLINK.to_ne_bytes());
    message.extend(FLAGS.to_ne_bytes());
    message.extend([0; 12]);
    message.extend(INDEX.to_ne_bytes());
    message.extend(up.to_ne_bytes());
    message.extend(up.to_ne_bytes());

    let kernel = socket(
        AddressFamily::Netlink,
        SockType::Raw,
        SockFlag::SOCK_CLOEXEC,
        SockProtocol::NetlinkRoute,
    )?;
    send(kernel.as_raw_fd(), &message, MsgFlags::empty())?;
    // The answer has a header, and then the error, which is 0 after a success.
    let mut answer = [0; 1024];
    let length = recv(kernel.as_raw_fd(), &mut answer, MsgFlags::empty())?;
    let error = answer[..length]
        .get(16..20)
        .and_then(|bytes| bytes.try_into().ok());
    match error.map(i32::from_ne_bytes) {
        Some(0) => Ok(()),
        Some(error) => Err(io::Error::from_raw_os_error(-error)),
        None => Err(io::Error::other("the kernel does not answer")),
    }
}
