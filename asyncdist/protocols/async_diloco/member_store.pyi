from protocols.async_diloco.member_store import *
