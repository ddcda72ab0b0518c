"""Models, trees and values as flat memory or bytes. Nothing here sends."""
